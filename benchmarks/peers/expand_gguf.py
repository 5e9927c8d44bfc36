"""GGUF to GGUF with its blocks expanded to bfloat16, for llama.cpp. Needs the package gguf.

python expand_gguf.py model.gguf OUT.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf

_WRITTEN_ANEW = ("general.architecture", "general.file_type", "general.quantization_version")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source = gguf.GGUFReader(Path(sys.argv[1]))
    writer = gguf.GGUFWriter(Path(sys.argv[2]), source.fields["general.architecture"].contents())
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for field in source.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in _WRITTEN_ANEW:
            kind, last = field.types[0], field.types[-1]
            is_array = kind == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), kind, last if is_array else None)
    for tensor in source.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:  # norms, which llama.cpp wants in float32
            writer.add_tensor(tensor.name, values)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
