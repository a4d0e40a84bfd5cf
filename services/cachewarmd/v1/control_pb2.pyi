from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_OBSERVER: _ClassVar[Role]
    ROLE_ENGINE: _ClassVar[Role]
    ROLE_ADMIN: _ClassVar[Role]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_PROTOCOL: _ClassVar[ErrorCode]
    ERROR_CODE_VERSION: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_PERMITTED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID: _ClassVar[ErrorCode]
    ERROR_CODE_MODEL_FILES: _ClassVar[ErrorCode]
    ERROR_CODE_NO_SPACE: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_FOUND: _ClassVar[ErrorCode]
    ERROR_CODE_LIMIT: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_SHUTTING_DOWN: _ClassVar[ErrorCode]

class PackOp(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PACK_OP_UNSPECIFIED: _ClassVar[PackOp]
    PACK_OP_COPY: _ClassVar[PackOp]
    PACK_OP_CAST: _ClassVar[PackOp]
    PACK_OP_PANELS: _ClassVar[PackOp]

class ItemState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ITEM_STATE_UNSPECIFIED: _ClassVar[ItemState]
    ITEM_STATE_PENDING: _ClassVar[ItemState]
    ITEM_STATE_RUNNING: _ClassVar[ItemState]
    ITEM_STATE_DONE: _ClassVar[ItemState]
    ITEM_STATE_FAILED: _ClassVar[ItemState]
    ITEM_STATE_CANCELLED: _ClassVar[ItemState]
    ITEM_STATE_TIMED_OUT: _ClassVar[ItemState]
    ITEM_STATE_SKIPPED: _ClassVar[ItemState]
ROLE_UNSPECIFIED: Role
ROLE_OBSERVER: Role
ROLE_ENGINE: Role
ROLE_ADMIN: Role
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_PROTOCOL: ErrorCode
ERROR_CODE_VERSION: ErrorCode
ERROR_CODE_NOT_PERMITTED: ErrorCode
ERROR_CODE_INVALID: ErrorCode
ERROR_CODE_MODEL_FILES: ErrorCode
ERROR_CODE_NO_SPACE: ErrorCode
ERROR_CODE_NOT_FOUND: ErrorCode
ERROR_CODE_LIMIT: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_SHUTTING_DOWN: ErrorCode
PACK_OP_UNSPECIFIED: PackOp
PACK_OP_COPY: PackOp
PACK_OP_CAST: PackOp
PACK_OP_PANELS: PackOp
ITEM_STATE_UNSPECIFIED: ItemState
ITEM_STATE_PENDING: ItemState
ITEM_STATE_RUNNING: ItemState
ITEM_STATE_DONE: ItemState
ITEM_STATE_FAILED: ItemState
ITEM_STATE_CANCELLED: ItemState
ITEM_STATE_TIMED_OUT: ItemState
ITEM_STATE_SKIPPED: ItemState

class Envelope(_message.Message):
    __slots__ = ("id", "more", "num_fds", "hello", "hello_reply", "error", "ok", "attach_weights", "attach_progress", "attach_weights_reply", "register", "register_reply", "peek", "peek_reply", "lookup", "lookup_reply", "publish", "publish_reply", "release", "provide", "warm_item", "warm_item_update", "reattach", "reattach_reply", "status", "status_reply", "warmup", "warmup_reply", "watch_job", "job_progress", "is_warm", "is_warm_reply", "evict", "evict_reply", "shutdown", "jobs", "jobs_reply", "cancel_job", "snapshot_save", "snapshot_load", "snapshot_reply", "verify", "verify_reply", "work_progress", "kick", "pin", "pin_reply", "unpin", "pins", "pins_reply", "purge", "unpin_reply", "warm_item_cancel", "get_prompts", "get_prompts_reply", "put_prompts", "numa", "numa_reply", "learned", "learned_reply")
    ID_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    NUM_FDS_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HELLO_REPLY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ATTACH_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ATTACH_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ATTACH_WEIGHTS_REPLY_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    REGISTER_REPLY_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    PEEK_REPLY_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_REPLY_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_REPLY_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PROVIDE_FIELD_NUMBER: _ClassVar[int]
    WARM_ITEM_FIELD_NUMBER: _ClassVar[int]
    WARM_ITEM_UPDATE_FIELD_NUMBER: _ClassVar[int]
    REATTACH_FIELD_NUMBER: _ClassVar[int]
    REATTACH_REPLY_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATUS_REPLY_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    WARMUP_REPLY_FIELD_NUMBER: _ClassVar[int]
    WATCH_JOB_FIELD_NUMBER: _ClassVar[int]
    JOB_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    IS_WARM_FIELD_NUMBER: _ClassVar[int]
    IS_WARM_REPLY_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    EVICT_REPLY_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    JOBS_REPLY_FIELD_NUMBER: _ClassVar[int]
    CANCEL_JOB_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SAVE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_LOAD_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_REPLY_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    VERIFY_REPLY_FIELD_NUMBER: _ClassVar[int]
    WORK_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    KICK_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    PIN_REPLY_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    PINS_REPLY_FIELD_NUMBER: _ClassVar[int]
    PURGE_FIELD_NUMBER: _ClassVar[int]
    UNPIN_REPLY_FIELD_NUMBER: _ClassVar[int]
    WARM_ITEM_CANCEL_FIELD_NUMBER: _ClassVar[int]
    GET_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    GET_PROMPTS_REPLY_FIELD_NUMBER: _ClassVar[int]
    PUT_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUMA_FIELD_NUMBER: _ClassVar[int]
    NUMA_REPLY_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    LEARNED_REPLY_FIELD_NUMBER: _ClassVar[int]
    id: int
    more: bool
    num_fds: int
    hello: Hello
    hello_reply: HelloReply
    error: ErrorReply
    ok: Ok
    attach_weights: AttachWeights
    attach_progress: AttachProgress
    attach_weights_reply: AttachWeightsReply
    register: Register
    register_reply: RegisterReply
    peek: Peek
    peek_reply: PeekReply
    lookup: Lookup
    lookup_reply: LookupReply
    publish: Publish
    publish_reply: PublishReply
    release: Release
    provide: Provide
    warm_item: WarmItem
    warm_item_update: WarmItemUpdate
    reattach: Reattach
    reattach_reply: ReattachReply
    status: Status
    status_reply: StatusReply
    warmup: Warmup
    warmup_reply: WarmupReply
    watch_job: WatchJob
    job_progress: JobProgress
    is_warm: IsWarm
    is_warm_reply: IsWarmReply
    evict: Evict
    evict_reply: EvictReply
    shutdown: Shutdown
    jobs: Jobs
    jobs_reply: JobsReply
    cancel_job: CancelJob
    snapshot_save: SnapshotSave
    snapshot_load: SnapshotLoad
    snapshot_reply: SnapshotReply
    verify: Verify
    verify_reply: VerifyReply
    work_progress: WorkProgress
    kick: Kick
    pin: Pin
    pin_reply: PinReply
    unpin: Unpin
    pins: Pins
    pins_reply: PinsReply
    purge: Purge
    unpin_reply: UnpinReply
    warm_item_cancel: WarmItemCancel
    get_prompts: GetPrompts
    get_prompts_reply: GetPromptsReply
    put_prompts: PutPrompts
    numa: Numa
    numa_reply: NumaReply
    learned: Learned
    learned_reply: LearnedReply
    def __init__(self, id: _Optional[int] = ..., more: _Optional[bool] = ..., num_fds: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., hello_reply: _Optional[_Union[HelloReply, _Mapping]] = ..., error: _Optional[_Union[ErrorReply, _Mapping]] = ..., ok: _Optional[_Union[Ok, _Mapping]] = ..., attach_weights: _Optional[_Union[AttachWeights, _Mapping]] = ..., attach_progress: _Optional[_Union[AttachProgress, _Mapping]] = ..., attach_weights_reply: _Optional[_Union[AttachWeightsReply, _Mapping]] = ..., register: _Optional[_Union[Register, _Mapping]] = ..., register_reply: _Optional[_Union[RegisterReply, _Mapping]] = ..., peek: _Optional[_Union[Peek, _Mapping]] = ..., peek_reply: _Optional[_Union[PeekReply, _Mapping]] = ..., lookup: _Optional[_Union[Lookup, _Mapping]] = ..., lookup_reply: _Optional[_Union[LookupReply, _Mapping]] = ..., publish: _Optional[_Union[Publish, _Mapping]] = ..., publish_reply: _Optional[_Union[PublishReply, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., provide: _Optional[_Union[Provide, _Mapping]] = ..., warm_item: _Optional[_Union[WarmItem, _Mapping]] = ..., warm_item_update: _Optional[_Union[WarmItemUpdate, _Mapping]] = ..., reattach: _Optional[_Union[Reattach, _Mapping]] = ..., reattach_reply: _Optional[_Union[ReattachReply, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., status_reply: _Optional[_Union[StatusReply, _Mapping]] = ..., warmup: _Optional[_Union[Warmup, _Mapping]] = ..., warmup_reply: _Optional[_Union[WarmupReply, _Mapping]] = ..., watch_job: _Optional[_Union[WatchJob, _Mapping]] = ..., job_progress: _Optional[_Union[JobProgress, _Mapping]] = ..., is_warm: _Optional[_Union[IsWarm, _Mapping]] = ..., is_warm_reply: _Optional[_Union[IsWarmReply, _Mapping]] = ..., evict: _Optional[_Union[Evict, _Mapping]] = ..., evict_reply: _Optional[_Union[EvictReply, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., jobs: _Optional[_Union[Jobs, _Mapping]] = ..., jobs_reply: _Optional[_Union[JobsReply, _Mapping]] = ..., cancel_job: _Optional[_Union[CancelJob, _Mapping]] = ..., snapshot_save: _Optional[_Union[SnapshotSave, _Mapping]] = ..., snapshot_load: _Optional[_Union[SnapshotLoad, _Mapping]] = ..., snapshot_reply: _Optional[_Union[SnapshotReply, _Mapping]] = ..., verify: _Optional[_Union[Verify, _Mapping]] = ..., verify_reply: _Optional[_Union[VerifyReply, _Mapping]] = ..., work_progress: _Optional[_Union[WorkProgress, _Mapping]] = ..., kick: _Optional[_Union[Kick, _Mapping]] = ..., pin: _Optional[_Union[Pin, _Mapping]] = ..., pin_reply: _Optional[_Union[PinReply, _Mapping]] = ..., unpin: _Optional[_Union[Unpin, _Mapping]] = ..., pins: _Optional[_Union[Pins, _Mapping]] = ..., pins_reply: _Optional[_Union[PinsReply, _Mapping]] = ..., purge: _Optional[_Union[Purge, _Mapping]] = ..., unpin_reply: _Optional[_Union[UnpinReply, _Mapping]] = ..., warm_item_cancel: _Optional[_Union[WarmItemCancel, _Mapping]] = ..., get_prompts: _Optional[_Union[GetPrompts, _Mapping]] = ..., get_prompts_reply: _Optional[_Union[GetPromptsReply, _Mapping]] = ..., put_prompts: _Optional[_Union[PutPrompts, _Mapping]] = ..., numa: _Optional[_Union[Numa, _Mapping]] = ..., numa_reply: _Optional[_Union[NumaReply, _Mapping]] = ..., learned: _Optional[_Union[Learned, _Mapping]] = ..., learned_reply: _Optional[_Union[LearnedReply, _Mapping]] = ...) -> None: ...

class Ok(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ErrorReply(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "role", "name", "pid", "private_pool_bytes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    role: Role
    name: str
    pid: int
    private_pool_bytes: int
    def __init__(self, protocol_version: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., name: _Optional[str] = ..., pid: _Optional[int] = ..., private_pool_bytes: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol_version", "version", "pid", "epoch", "pool_bytes", "extent_bytes", "salt", "client_id", "pool_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    version: str
    pid: int
    epoch: int
    pool_bytes: int
    extent_bytes: int
    salt: bytes
    client_id: int
    pool_id: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., version: _Optional[str] = ..., pid: _Optional[int] = ..., epoch: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., extent_bytes: _Optional[int] = ..., salt: _Optional[bytes] = ..., client_id: _Optional[int] = ..., pool_id: _Optional[bytes] = ...) -> None: ...

class PackTensor(_message.Message):
    __slots__ = ("name", "op", "shape", "dtype", "offset", "num_bytes", "row_group", "column_group")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROW_GROUP_FIELD_NUMBER: _ClassVar[int]
    COLUMN_GROUP_FIELD_NUMBER: _ClassVar[int]
    name: str
    op: PackOp
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    offset: int
    num_bytes: int
    row_group: int
    column_group: int
    def __init__(self, name: _Optional[str] = ..., op: _Optional[_Union[PackOp, str]] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ..., row_group: _Optional[int] = ..., column_group: _Optional[int] = ...) -> None: ...

class PackPlan(_message.Message):
    __slots__ = ("description", "tensors", "segment_bytes")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    description: str
    tensors: _containers.RepeatedCompositeFieldContainer[PackTensor]
    segment_bytes: int
    def __init__(self, description: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[PackTensor, _Mapping]]] = ..., segment_bytes: _Optional[int] = ...) -> None: ...

class AttachWeights(_message.Message):
    __slots__ = ("model_name", "version", "plan")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    version: str
    plan: PackPlan
    def __init__(self, model_name: _Optional[str] = ..., version: _Optional[str] = ..., plan: _Optional[_Union[PackPlan, _Mapping]] = ...) -> None: ...

class AttachProgress(_message.Message):
    __slots__ = ("phase", "done_bytes", "total_bytes")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    phase: str
    done_bytes: int
    total_bytes: int
    def __init__(self, phase: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class AttachWeightsReply(_message.Message):
    __slots__ = ("weights_sha256", "version", "segment_bytes", "already_warm")
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALREADY_WARM_FIELD_NUMBER: _ClassVar[int]
    weights_sha256: bytes
    version: str
    segment_bytes: int
    already_warm: bool
    def __init__(self, weights_sha256: _Optional[bytes] = ..., version: _Optional[str] = ..., segment_bytes: _Optional[int] = ..., already_warm: _Optional[bool] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("stamp", "slot_bytes", "block_size", "description", "weights_sha256")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    stamp: bytes
    slot_bytes: int
    block_size: int
    description: str
    weights_sha256: bytes
    def __init__(self, stamp: _Optional[bytes] = ..., slot_bytes: _Optional[int] = ..., block_size: _Optional[int] = ..., description: _Optional[str] = ..., weights_sha256: _Optional[bytes] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("stamp_id", "wants_token_ids")
    STAMP_ID_FIELD_NUMBER: _ClassVar[int]
    WANTS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    stamp_id: int
    wants_token_ids: bool
    def __init__(self, stamp_id: _Optional[int] = ..., wants_token_ids: _Optional[bool] = ...) -> None: ...

class Peek(_message.Message):
    __slots__ = ("stamp_id", "keys")
    STAMP_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    stamp_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, stamp_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PeekReply(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("slot", "generation", "offset", "num_tokens")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    offset: int
    num_tokens: int
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., offset: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Lookup(_message.Message):
    __slots__ = ("stamp_id", "keys", "tail_keys", "token_ids", "tenant", "cache_salt", "is_prefill_only")
    STAMP_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TAIL_KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    IS_PREFILL_ONLY_FIELD_NUMBER: _ClassVar[int]
    stamp_id: int
    keys: bytes
    tail_keys: bytes
    token_ids: bytes
    tenant: str
    cache_salt: str
    is_prefill_only: bool
    def __init__(self, stamp_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., tail_keys: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., is_prefill_only: _Optional[bool] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("lease", "blocks")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    blocks: bytes
    def __init__(self, lease: _Optional[int] = ..., blocks: _Optional[bytes] = ...) -> None: ...

class PublishBlock(_message.Message):
    __slots__ = ("parent_key", "key", "num_tokens", "private_offset")
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    parent_key: bytes
    key: bytes
    num_tokens: int
    private_offset: int
    def __init__(self, parent_key: _Optional[bytes] = ..., key: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., private_offset: _Optional[int] = ...) -> None: ...

class Publish(_message.Message):
    __slots__ = ("lease", "chain", "is_root")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    IS_ROOT_FIELD_NUMBER: _ClassVar[int]
    lease: int
    chain: _containers.RepeatedCompositeFieldContainer[PublishBlock]
    is_root: bool
    def __init__(self, lease: _Optional[int] = ..., chain: _Optional[_Iterable[_Union[PublishBlock, _Mapping]]] = ..., is_root: _Optional[bool] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("blocks", "refused")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    refused: str
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., refused: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    def __init__(self, lease: _Optional[int] = ...) -> None: ...

class Reattach(_message.Message):
    __slots__ = ("epoch", "client_id", "claims")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    client_id: int
    claims: _containers.RepeatedCompositeFieldContainer[Claim]
    def __init__(self, epoch: _Optional[int] = ..., client_id: _Optional[int] = ..., claims: _Optional[_Iterable[_Union[Claim, _Mapping]]] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("stamp_id", "block")
    STAMP_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    stamp_id: int
    block: Handle
    def __init__(self, stamp_id: _Optional[int] = ..., block: _Optional[_Union[Handle, _Mapping]] = ...) -> None: ...

class Handle(_message.Message):
    __slots__ = ("slot", "generation")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class ReattachReply(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leases: _Optional[_Iterable[int]] = ...) -> None: ...

class Provide(_message.Message):
    __slots__ = ("weights_sha256", "model_name", "stamp")
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    weights_sha256: bytes
    model_name: str
    stamp: str
    def __init__(self, weights_sha256: _Optional[bytes] = ..., model_name: _Optional[str] = ..., stamp: _Optional[str] = ...) -> None: ...

class WarmPrompt(_message.Message):
    __slots__ = ("text", "token_ids", "chat", "shape", "name", "urgency", "pin", "ttl_ms", "deadline_ms", "tenant", "cache_salt", "is_optional")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    URGENCY_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    IS_OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    chat: ChatPrompt
    shape: Shape
    name: str
    urgency: int
    pin: bool
    ttl_ms: int
    deadline_ms: int
    tenant: str
    cache_salt: str
    is_optional: bool
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., shape: _Optional[_Union[Shape, _Mapping]] = ..., name: _Optional[str] = ..., urgency: _Optional[int] = ..., pin: _Optional[bool] = ..., ttl_ms: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., is_optional: _Optional[bool] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages_json", "add_generation_prompt")
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    messages_json: str
    add_generation_prompt: bool
    def __init__(self, messages_json: _Optional[str] = ..., add_generation_prompt: _Optional[bool] = ...) -> None: ...

class Shape(_message.Message):
    __slots__ = ("length", "iterations")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    length: int
    iterations: int
    def __init__(self, length: _Optional[int] = ..., iterations: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class WarmItem(_message.Message):
    __slots__ = ("job_id", "index", "prompt")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    index: int
    prompt: WarmPrompt
    def __init__(self, job_id: _Optional[int] = ..., index: _Optional[int] = ..., prompt: _Optional[_Union[WarmPrompt, _Mapping]] = ...) -> None: ...

class WarmItemUpdate(_message.Message):
    __slots__ = ("job_id", "index", "state", "num_tokens", "done_tokens", "already_warm", "error", "num_cached", "first_us", "last_us")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALREADY_WARM_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    FIRST_US_FIELD_NUMBER: _ClassVar[int]
    LAST_US_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    index: int
    state: ItemState
    num_tokens: int
    done_tokens: int
    already_warm: bool
    error: str
    num_cached: int
    first_us: int
    last_us: int
    def __init__(self, job_id: _Optional[int] = ..., index: _Optional[int] = ..., state: _Optional[_Union[ItemState, str]] = ..., num_tokens: _Optional[int] = ..., done_tokens: _Optional[int] = ..., already_warm: _Optional[bool] = ..., error: _Optional[str] = ..., num_cached: _Optional[int] = ..., first_us: _Optional[int] = ..., last_us: _Optional[int] = ...) -> None: ...

class WarmItemCancel(_message.Message):
    __slots__ = ("job_id", "index")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    index: int
    def __init__(self, job_id: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class Warmup(_message.Message):
    __slots__ = ("model_name", "version", "plan", "prompts", "key", "if_version", "stall_timeout_ms", "max_parallel")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    IF_VERSION_FIELD_NUMBER: _ClassVar[int]
    STALL_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    version: str
    plan: PackPlan
    prompts: _containers.RepeatedCompositeFieldContainer[WarmPrompt]
    key: str
    if_version: str
    stall_timeout_ms: int
    max_parallel: int
    def __init__(self, model_name: _Optional[str] = ..., version: _Optional[str] = ..., plan: _Optional[_Union[PackPlan, _Mapping]] = ..., prompts: _Optional[_Iterable[_Union[WarmPrompt, _Mapping]]] = ..., key: _Optional[str] = ..., if_version: _Optional[str] = ..., stall_timeout_ms: _Optional[int] = ..., max_parallel: _Optional[int] = ...) -> None: ...

class WarmupReply(_message.Message):
    __slots__ = ("job_id", "is_known")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    IS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    is_known: bool
    def __init__(self, job_id: _Optional[int] = ..., is_known: _Optional[bool] = ...) -> None: ...

class WatchJob(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    def __init__(self, job_id: _Optional[int] = ...) -> None: ...

class JobItem(_message.Message):
    __slots__ = ("index", "state", "num_tokens", "done_tokens", "already_warm", "detail", "name", "first_us", "last_us", "is_optional")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALREADY_WARM_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_US_FIELD_NUMBER: _ClassVar[int]
    LAST_US_FIELD_NUMBER: _ClassVar[int]
    IS_OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    index: int
    state: ItemState
    num_tokens: int
    done_tokens: int
    already_warm: bool
    detail: str
    name: str
    first_us: int
    last_us: int
    is_optional: bool
    def __init__(self, index: _Optional[int] = ..., state: _Optional[_Union[ItemState, str]] = ..., num_tokens: _Optional[int] = ..., done_tokens: _Optional[int] = ..., already_warm: _Optional[bool] = ..., detail: _Optional[str] = ..., name: _Optional[str] = ..., first_us: _Optional[int] = ..., last_us: _Optional[int] = ..., is_optional: _Optional[bool] = ...) -> None: ...

class JobProgress(_message.Message):
    __slots__ = ("job_id", "state", "weights", "weights_done", "weights_already_warm", "items", "error", "model_name", "num_items", "num_items_done")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DONE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ALREADY_WARM_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_ITEMS_FIELD_NUMBER: _ClassVar[int]
    NUM_ITEMS_DONE_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    state: str
    weights: AttachProgress
    weights_done: bool
    weights_already_warm: bool
    items: _containers.RepeatedCompositeFieldContainer[JobItem]
    error: str
    model_name: str
    num_items: int
    num_items_done: int
    def __init__(self, job_id: _Optional[int] = ..., state: _Optional[str] = ..., weights: _Optional[_Union[AttachProgress, _Mapping]] = ..., weights_done: _Optional[bool] = ..., weights_already_warm: _Optional[bool] = ..., items: _Optional[_Iterable[_Union[JobItem, _Mapping]]] = ..., error: _Optional[str] = ..., model_name: _Optional[str] = ..., num_items: _Optional[int] = ..., num_items_done: _Optional[int] = ...) -> None: ...

class Jobs(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JobsReply(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobProgress]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobProgress, _Mapping]]] = ...) -> None: ...

class CancelJob(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    def __init__(self, job_id: _Optional[int] = ...) -> None: ...

class IsWarm(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class IsWarmReply(_message.Message):
    __slots__ = ("is_known", "is_warm", "detail")
    IS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    IS_WARM_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    is_known: bool
    is_warm: bool
    detail: str
    def __init__(self, is_known: _Optional[bool] = ..., is_warm: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class Evict(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("num_blocks", "num_bytes", "num_kept")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_bytes: int
    num_kept: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_kept: _Optional[int] = ...) -> None: ...

class WorkProgress(_message.Message):
    __slots__ = ("done_bytes", "total_bytes")
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    done_bytes: int
    total_bytes: int
    def __init__(self, done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class SnapshotSave(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class SnapshotLoad(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("num_blocks", "num_bytes", "num_known", "refused")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_bytes: int
    num_known: int
    refused: _containers.ScalarMap[str, int]
    def __init__(self, num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_known: _Optional[int] = ..., refused: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("num_blocks", "num_bytes", "num_failures")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_bytes: int
    num_failures: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_failures: _Optional[int] = ...) -> None: ...

class Kick(_message.Message):
    __slots__ = ("client_id",)
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    def __init__(self, client_id: _Optional[int] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("lease", "key", "ttl_ms", "label")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    lease: int
    key: bytes
    ttl_ms: int
    label: str
    def __init__(self, lease: _Optional[int] = ..., key: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., label: _Optional[str] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pin_id", "num_bytes")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    num_bytes: int
    def __init__(self, pin_id: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Unpin(_message.Message):
    __slots__ = ("pin_ids", "label", "all")
    PIN_IDS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    pin_ids: _containers.RepeatedScalarFieldContainer[int]
    label: str
    all: bool
    def __init__(self, pin_ids: _Optional[_Iterable[int]] = ..., label: _Optional[str] = ..., all: _Optional[bool] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("num_pins",)
    NUM_PINS_FIELD_NUMBER: _ClassVar[int]
    num_pins: int
    def __init__(self, num_pins: _Optional[int] = ...) -> None: ...

class Pins(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinStatus(_message.Message):
    __slots__ = ("pin_id", "label", "key", "stamp", "num_blocks", "num_bytes", "expires_unix_ms")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    pin_id: int
    label: str
    key: bytes
    stamp: str
    num_blocks: int
    num_bytes: int
    expires_unix_ms: int
    def __init__(self, pin_id: _Optional[int] = ..., label: _Optional[str] = ..., key: _Optional[bytes] = ..., stamp: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., expires_unix_ms: _Optional[int] = ...) -> None: ...

class PinsReply(_message.Message):
    __slots__ = ("pins", "num_bytes", "max_bytes")
    PINS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinStatus]
    num_bytes: int
    max_bytes: int
    def __init__(self, pins: _Optional[_Iterable[_Union[PinStatus, _Mapping]]] = ..., num_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class Purge(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class Learned(_message.Message):
    __slots__ = ("top", "min_count", "model")
    TOP_FIELD_NUMBER: _ClassVar[int]
    MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    top: int
    min_count: float
    model: str
    def __init__(self, top: _Optional[int] = ..., min_count: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class LearnedPrefix(_message.Message):
    __slots__ = ("stamp", "key", "num_tokens", "count", "saving_tokens", "token_ids", "tenant", "cache_salt")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SAVING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    stamp: str
    key: bytes
    num_tokens: int
    count: float
    saving_tokens: float
    token_ids: bytes
    tenant: str
    cache_salt: str
    def __init__(self, stamp: _Optional[str] = ..., key: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., count: _Optional[float] = ..., saving_tokens: _Optional[float] = ..., token_ids: _Optional[bytes] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class LearnedReply(_message.Message):
    __slots__ = ("prefixes", "learn", "num_left_out")
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    LEARN_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[LearnedPrefix]
    learn: str
    num_left_out: int
    def __init__(self, prefixes: _Optional[_Iterable[_Union[LearnedPrefix, _Mapping]]] = ..., learn: _Optional[str] = ..., num_left_out: _Optional[int] = ...) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ("only_if_unused",)
    ONLY_IF_UNUSED_FIELD_NUMBER: _ClassVar[int]
    only_if_unused: bool
    def __init__(self, only_if_unused: _Optional[bool] = ...) -> None: ...

class Numa(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NumaNode(_message.Message):
    __slots__ = ("number", "cpus", "total_bytes", "free_bytes", "is_wanted")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_WANTED_FIELD_NUMBER: _ClassVar[int]
    number: int
    cpus: str
    total_bytes: int
    free_bytes: int
    is_wanted: bool
    def __init__(self, number: _Optional[int] = ..., cpus: _Optional[str] = ..., total_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., is_wanted: _Optional[bool] = ...) -> None: ...

class NumaRegion(_message.Message):
    __slots__ = ("name", "num_bytes", "num_sampled", "num_misplaced", "node_bytes")
    class NodeBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    NUM_MISPLACED_FIELD_NUMBER: _ClassVar[int]
    NODE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_bytes: int
    num_sampled: int
    num_misplaced: int
    node_bytes: _containers.ScalarMap[int, int]
    def __init__(self, name: _Optional[str] = ..., num_bytes: _Optional[int] = ..., num_sampled: _Optional[int] = ..., num_misplaced: _Optional[int] = ..., node_bytes: _Optional[_Mapping[int, int]] = ...) -> None: ...

class NumaReply(_message.Message):
    __slots__ = ("policy", "nodes", "regions", "refusal")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    policy: str
    nodes: _containers.RepeatedCompositeFieldContainer[NumaNode]
    regions: _containers.RepeatedCompositeFieldContainer[NumaRegion]
    refusal: str
    def __init__(self, policy: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NumaNode, _Mapping]]] = ..., regions: _Optional[_Iterable[_Union[NumaRegion, _Mapping]]] = ..., refusal: _Optional[str] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("pool_bytes", "committed_bytes", "num_extents", "num_extents_free", "blocks", "bytes", "page_bytes", "huge_bytes", "locked", "small_pages_because")
    class BlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class BytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXTENTS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HUGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOCKED_FIELD_NUMBER: _ClassVar[int]
    SMALL_PAGES_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    pool_bytes: int
    committed_bytes: int
    num_extents: int
    num_extents_free: int
    blocks: _containers.ScalarMap[str, int]
    bytes: _containers.ScalarMap[str, int]
    page_bytes: int
    huge_bytes: int
    locked: bool
    small_pages_because: str
    def __init__(self, pool_bytes: _Optional[int] = ..., committed_bytes: _Optional[int] = ..., num_extents: _Optional[int] = ..., num_extents_free: _Optional[int] = ..., blocks: _Optional[_Mapping[str, int]] = ..., bytes: _Optional[_Mapping[str, int]] = ..., page_bytes: _Optional[int] = ..., huge_bytes: _Optional[int] = ..., locked: _Optional[bool] = ..., small_pages_because: _Optional[str] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("model_name", "version", "weights_sha256", "layout", "segment_bytes", "files_present", "loaded_unix_ms", "plan", "num_clients", "huge_bytes", "superseded", "files_changed")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILES_PRESENT_FIELD_NUMBER: _ClassVar[int]
    LOADED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    NUM_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    HUGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    FILES_CHANGED_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    version: str
    weights_sha256: str
    layout: str
    segment_bytes: int
    files_present: bool
    loaded_unix_ms: int
    plan: str
    num_clients: int
    huge_bytes: int
    superseded: bool
    files_changed: bool
    def __init__(self, model_name: _Optional[str] = ..., version: _Optional[str] = ..., weights_sha256: _Optional[str] = ..., layout: _Optional[str] = ..., segment_bytes: _Optional[int] = ..., files_present: _Optional[bool] = ..., loaded_unix_ms: _Optional[int] = ..., plan: _Optional[str] = ..., num_clients: _Optional[int] = ..., huge_bytes: _Optional[int] = ..., superseded: _Optional[bool] = ..., files_changed: _Optional[bool] = ...) -> None: ...

class StampStatus(_message.Message):
    __slots__ = ("stamp", "description", "slot_bytes", "block_size", "num_blocks", "superseded")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    stamp: str
    description: str
    slot_bytes: int
    block_size: int
    num_blocks: int
    superseded: bool
    def __init__(self, stamp: _Optional[str] = ..., description: _Optional[str] = ..., slot_bytes: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., superseded: _Optional[bool] = ...) -> None: ...

class ClientStatus(_message.Message):
    __slots__ = ("client_id", "name", "role", "pid", "uid", "num_leases", "is_provider", "held_bytes", "max_held_bytes")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    IS_PROVIDER_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    client_id: int
    name: str
    role: str
    pid: int
    uid: int
    num_leases: int
    is_provider: bool
    held_bytes: int
    max_held_bytes: int
    def __init__(self, client_id: _Optional[int] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., pid: _Optional[int] = ..., uid: _Optional[int] = ..., num_leases: _Optional[int] = ..., is_provider: _Optional[bool] = ..., held_bytes: _Optional[int] = ..., max_held_bytes: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "pid", "epoch", "uptime_s", "socket", "pool", "models", "stamps", "clients", "counters", "num_jobs_active", "num_pins", "pinned_bytes", "max_pinned_bytes")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_JOBS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_PINS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: str
    pid: int
    epoch: int
    uptime_s: float
    socket: str
    pool: PoolStatus
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    stamps: _containers.RepeatedCompositeFieldContainer[StampStatus]
    clients: _containers.RepeatedCompositeFieldContainer[ClientStatus]
    counters: _containers.ScalarMap[str, int]
    num_jobs_active: int
    num_pins: int
    pinned_bytes: int
    max_pinned_bytes: int
    def __init__(self, version: _Optional[str] = ..., pid: _Optional[int] = ..., epoch: _Optional[int] = ..., uptime_s: _Optional[float] = ..., socket: _Optional[str] = ..., pool: _Optional[_Union[PoolStatus, _Mapping]] = ..., models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ..., stamps: _Optional[_Iterable[_Union[StampStatus, _Mapping]]] = ..., clients: _Optional[_Iterable[_Union[ClientStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., num_jobs_active: _Optional[int] = ..., num_pins: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., max_pinned_bytes: _Optional[int] = ...) -> None: ...

class GetPrompts(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class GetPromptsReply(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PutPrompts(_message.Message):
    __slots__ = ("keys", "ids")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[bytes] = ..., ids: _Optional[_Iterable[bytes]] = ...) -> None: ...
