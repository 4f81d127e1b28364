"""How the values of fields are held in columns, and which event times there are.

Invariant: every type of a field has exactly one form.
"""

import pyarrow as pa

from schemas.mesh import FieldType

MIN_TIME_MS, MAX_TIME_MS = 1, 253_402_300_799_999  # 1970-01-01T00:00:00.001Z to 9999-12-31T23:59:59.999Z
ARROW_TYPES: dict[FieldType, pa.DataType] = {
    FieldType.INT64: pa.int64(),
    FieldType.TIMESTAMP: pa.int64(),
    FieldType.FLOAT64: pa.float64(),
    FieldType.BOOL: pa.bool_(),
    FieldType.STRING: pa.large_utf8(),
}
assert set(ARROW_TYPES) == set(FieldType)
