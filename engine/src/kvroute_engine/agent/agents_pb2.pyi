from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    SERVER: _ClassVar[Kind]
    SWITCH: _ClassVar[Kind]
KIND_UNSPECIFIED: Kind
SERVER: Kind
SWITCH: Kind

class FromAgent(_message.Message):
    __slots__ = ("hello", "report")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    report: Report
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "kind", "name", "table_version", "release")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    kind: Kind
    name: str
    table_version: int
    release: str
    def __init__(self, protocol: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., name: _Optional[str] = ..., table_version: _Optional[int] = ..., release: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("clock_s", "ports", "nvlinks", "traffic", "slots", "incarnation")
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    NVLINKS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    clock_s: float
    ports: _containers.RepeatedCompositeFieldContainer[PortCounter]
    nvlinks: _containers.RepeatedCompositeFieldContainer[NvlinkRate]
    traffic: _containers.RepeatedCompositeFieldContainer[Traffic]
    slots: Slots
    incarnation: int
    def __init__(self, clock_s: _Optional[float] = ..., ports: _Optional[_Iterable[_Union[PortCounter, _Mapping]]] = ..., nvlinks: _Optional[_Iterable[_Union[NvlinkRate, _Mapping]]] = ..., traffic: _Optional[_Iterable[_Union[Traffic, _Mapping]]] = ..., slots: _Optional[_Union[Slots, _Mapping]] = ..., incarnation: _Optional[int] = ...) -> None: ...

class PortCounter(_message.Message):
    __slots__ = ("port", "tx_bytes", "rx_bytes")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TX_BYTES_FIELD_NUMBER: _ClassVar[int]
    RX_BYTES_FIELD_NUMBER: _ClassVar[int]
    port: int
    tx_bytes: int
    rx_bytes: int
    def __init__(self, port: _Optional[int] = ..., tx_bytes: _Optional[int] = ..., rx_bytes: _Optional[int] = ...) -> None: ...

class NvlinkRate(_message.Message):
    __slots__ = ("gpu", "tx_bytes_per_s", "rx_bytes_per_s")
    GPU_FIELD_NUMBER: _ClassVar[int]
    TX_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RX_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    gpu: int
    tx_bytes_per_s: float
    rx_bytes_per_s: float
    def __init__(self, gpu: _Optional[int] = ..., tx_bytes_per_s: _Optional[float] = ..., rx_bytes_per_s: _Optional[float] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("group", "incarnation", "counts", "table_version")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    group: str
    incarnation: int
    counts: _containers.RepeatedCompositeFieldContainer[Count]
    table_version: int
    def __init__(self, group: _Optional[str] = ..., incarnation: _Optional[int] = ..., counts: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., table_version: _Optional[int] = ...) -> None: ...

class Count(_message.Message):
    __slots__ = ("scheme", "size_exponent", "calls", "tensor_bytes")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    SIZE_EXPONENT_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    scheme: str
    size_exponent: int
    calls: int
    tensor_bytes: int
    def __init__(self, scheme: _Optional[str] = ..., size_exponent: _Optional[int] = ..., calls: _Optional[int] = ..., tensor_bytes: _Optional[int] = ...) -> None: ...

class Slots(_message.Message):
    __slots__ = ("total", "free")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ...) -> None: ...

class FromScheduler(_message.Message):
    __slots__ = ("welcome", "table", "heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    table: Table
    heartbeat: Heartbeat
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., table: _Optional[_Union[Table, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("period_s",)
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    period_s: float
    def __init__(self, period_s: _Optional[float] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("version", "groups")
    class GroupsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Entry
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Entry, _Mapping]] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    version: int
    groups: _containers.MessageMap[str, Entry]
    def __init__(self, version: _Optional[int] = ..., groups: _Optional[_Mapping[str, Entry]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("version", "rules")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    version: int
    rules: _containers.RepeatedCompositeFieldContainer[Rule]
    def __init__(self, version: _Optional[int] = ..., rules: _Optional[_Iterable[_Union[Rule, _Mapping]]] = ...) -> None: ...

class Rule(_message.Message):
    __slots__ = ("scheme", "up_to_bytes")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    UP_TO_BYTES_FIELD_NUMBER: _ClassVar[int]
    scheme: str
    up_to_bytes: int
    def __init__(self, scheme: _Optional[str] = ..., up_to_bytes: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...
