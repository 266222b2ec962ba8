//! The functions and structures of libibverbs and librdmacm that are used.
//!
//! Their types are those of the libraries' headers (`infiniband/verbs.h`, `rdma/rdma_cma.h`), which keep them
//! for a version of the file name: `libibverbs.so.1`, `librdmacm.so.1`. Only the first fields are declared of
//! structures that the libraries allocate. What the headers define as inline functions calls through the
//! table of functions in `ibv_context`.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::RdmaError;

/// Functions in `struct ibv_context_ops`.
const OPS: usize = 32;
const OP_POLL_CQ: usize = 11;
const OP_REQ_NOTIFY_CQ: usize = 12;
const OP_POST_SRQ_RECV: usize = 20;
const OP_POST_SEND: usize = 25;

/// `struct ibv_context`.
#[repr(C)]
pub(crate) struct Context {
    device: *mut c_void,
    ops: [*mut c_void; OPS],
}

const _: () = assert!(size_of::<Context>() == 264);

impl Context {
    /// `ibv_poll_cq`.
    pub(crate) fn poll_cq(
        &self,
    ) -> unsafe extern "C" fn(*mut CompletionQueue, c_int, *mut WorkCompletion) -> c_int {
        // SAFETY: the header's type of the function at this place.
        unsafe { std::mem::transmute(self.ops[OP_POLL_CQ]) }
    }

    /// `ibv_req_notify_cq`.
    pub(crate) fn req_notify_cq(&self) -> unsafe extern "C" fn(*mut CompletionQueue, c_int) -> c_int {
        // SAFETY: as above.
        unsafe { std::mem::transmute(self.ops[OP_REQ_NOTIFY_CQ]) }
    }

    /// `ibv_post_srq_recv`.
    pub(crate) fn post_srq_recv(
        &self,
    ) -> unsafe extern "C" fn(*mut c_void, *mut ReceiveRequest, *mut *mut ReceiveRequest) -> c_int {
        // SAFETY: as above.
        unsafe { std::mem::transmute(self.ops[OP_POST_SRQ_RECV]) }
    }

    /// `ibv_post_send`.
    pub(crate) fn post_send(
        &self,
    ) -> unsafe extern "C" fn(*mut QueuePairHandle, *mut SendRequest, *mut *mut SendRequest) -> c_int {
        // SAFETY: as above.
        unsafe { std::mem::transmute(self.ops[OP_POST_SEND]) }
    }
}

/// `struct ibv_cq`.
#[repr(C)]
pub(crate) struct CompletionQueue {
    pub(crate) context: *mut Context,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
pub(crate) struct CompletionChannel {
    context: *mut Context,
    pub(crate) fd: c_int,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(crate) struct MemoryRegion {
    context: *mut Context,
    pd: *mut c_void,
    address: *mut c_void,
    length: usize,
    handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// `struct ibv_qp`.
#[repr(C)]
pub(crate) struct QueuePairHandle {
    pub(crate) context: *mut Context,
    qp_context: *mut c_void,
    queues: [*mut c_void; 4],
    handle: u32,
    pub(crate) number: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
pub(crate) struct DeviceAttributes {
    firmware: [u8; 64],
    guids: [u64; 2],
    mr_bytes_max: u64,
    page_sizes: u64,
    vendor: [u32; 3],
    qp_max: c_int,
    pub(crate) qp_wr_max: c_int,
    capabilities: c_uint,
    pub(crate) sge_max: c_int,
    sge_rd_max: c_int,
    cq_max: c_int,
    pub(crate) cqe_max: c_int,
    mr_max: c_int,
    pd_max: c_int,
    pub(crate) qp_rd_atom_max: c_int,
    rd_atom_max: [c_int; 2],
    pub(crate) qp_init_rd_atom_max: c_int,
    others: [c_int; 13],
    srq_max: c_int,
    pub(crate) srq_wr_max: c_int,
    srq_sge_max: c_int,
    pkeys_max: u16,
    ack_delay: u8,
    ports: u8,
}

const _: () = assert!(size_of::<DeviceAttributes>() == 232);

/// `struct ibv_srq_init_attr`.
#[repr(C)]
pub(crate) struct SharedReceiveAttributes {
    pub(crate) context: *mut c_void,
    pub(crate) wr_max: u32,
    pub(crate) sge_max: u32,
    pub(crate) limit: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(crate) struct QueuePairAttributes {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut CompletionQueue,
    pub(crate) recv_cq: *mut CompletionQueue,
    pub(crate) srq: *mut c_void,
    pub(crate) send_wr_max: u32,
    pub(crate) recv_wr_max: u32,
    pub(crate) send_sge_max: u32,
    pub(crate) recv_sge_max: u32,
    pub(crate) inline_bytes_max: u32,
    pub(crate) qp_type: c_int,
    pub(crate) signal_all: c_int,
}

const _: () = assert!(size_of::<QueuePairAttributes>() == 64);

/// `IBV_QPT_RC`: a reliable connection.
pub(crate) const RELIABLE_CONNECTION: c_int = 2;

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LocalRange {
    pub(crate) address: u64,
    pub(crate) length: u32,
    pub(crate) key: u32,
}

/// `struct ibv_recv_wr`.
#[repr(C)]
pub(crate) struct ReceiveRequest {
    pub(crate) id: u64,
    pub(crate) next: *mut ReceiveRequest,
    pub(crate) ranges: *mut LocalRange,
    pub(crate) range_count: c_int,
}

/// `struct ibv_send_wr`, of which reads, writes and sends of a reliable connection use these fields.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SendRequest {
    pub(crate) id: u64,
    pub(crate) next: *mut SendRequest,
    pub(crate) ranges: *mut LocalRange,
    pub(crate) range_count: c_int,
    pub(crate) opcode: c_int,
    pub(crate) flags: c_uint,
    pub(crate) invalidated_key: u32,
    pub(crate) remote_address: u64,
    pub(crate) remote_key: u32,
    pub(crate) unused: [u32; 19],
}

const _: () = assert!(size_of::<SendRequest>() == 128);

impl SendRequest {
    pub(crate) const EMPTY: SendRequest = SendRequest {
        id: 0,
        next: std::ptr::null_mut(),
        ranges: std::ptr::null_mut(),
        range_count: 0,
        opcode: 0,
        flags: 0,
        invalidated_key: 0,
        remote_address: 0,
        remote_key: 0,
        unused: [0; 19],
    };
}

/// `enum ibv_wr_opcode`.
pub(crate) mod opcode {
    use std::ffi::c_int;

    pub(crate) const RDMA_WRITE: c_int = 0;
    pub(crate) const SEND: c_int = 2;
    pub(crate) const RDMA_READ: c_int = 4;
    pub(crate) const SEND_WITH_INVALIDATE: c_int = 9;
}

/// `enum ibv_send_flags`: a completion is wanted.
pub(crate) const SIGNALED: c_uint = 1 << 1;
/// `enum ibv_send_flags`: the data is copied when the request is posted.
pub(crate) const INLINE: c_uint = 1 << 3;
/// `IBV_ACCESS_LOCAL_WRITE`.
pub(crate) const ACCESS_LOCAL_WRITE: c_int = 1;
/// `IBV_ACCESS_REMOTE_WRITE` and `IBV_ACCESS_REMOTE_READ`.
pub(crate) const ACCESS_REMOTE: c_int = 1 << 1 | 1 << 2;

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct WorkCompletion {
    pub(crate) id: u64,
    pub(crate) status: c_int,
    /// Not valid of one that failed.
    pub(crate) opcode: c_int,
    vendor_error: u32,
    pub(crate) length: u32,
    immediate: u32,
    pub(crate) qp_number: u32,
    source: u32,
    flags: c_uint,
    pkey: u16,
    slid: u16,
    service_level: u8,
    path_bits: u8,
}

const _: () = assert!(size_of::<WorkCompletion>() == 48);

/// `struct rdma_event_channel`.
#[repr(C)]
pub(crate) struct CmChannel {
    pub(crate) fd: c_int,
}

/// `struct rdma_cm_id`, up to the addresses of its route.
#[repr(C)]
pub(crate) struct CmId {
    pub(crate) verbs: *mut Context,
    channel: *mut CmChannel,
    context: *mut c_void,
    pub(crate) qp: *mut QueuePairHandle,
    pub(crate) local: libc::sockaddr_storage,
    pub(crate) peer: libc::sockaddr_storage,
}

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ConnectionParameters {
    pub(crate) private_data: *const c_void,
    pub(crate) private_data_length: u8,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: u8,
    pub(crate) qp_number: u32,
}

/// `struct rdma_cm_event`, of a connection.
#[repr(C)]
pub(crate) struct CmEventRecord {
    pub(crate) id: *mut CmId,
    pub(crate) listener: *mut CmId,
    pub(crate) kind: c_int,
    pub(crate) status: c_int,
    pub(crate) connection: ConnectionParameters,
}

const _: () = assert!(size_of::<ConnectionParameters>() == 24 && size_of::<CmEventRecord>() == 48);

/// `enum rdma_cm_event_type`.
pub(crate) mod event {
    use std::ffi::c_int;

    pub(crate) const ADDR_RESOLVED: c_int = 0;
    pub(crate) const ADDR_ERROR: c_int = 1;
    pub(crate) const ROUTE_RESOLVED: c_int = 2;
    pub(crate) const ROUTE_ERROR: c_int = 3;
    pub(crate) const CONNECT_REQUEST: c_int = 4;
    pub(crate) const CONNECT_ERROR: c_int = 6;
    pub(crate) const UNREACHABLE: c_int = 7;
    pub(crate) const REJECTED: c_int = 8;
    pub(crate) const ESTABLISHED: c_int = 9;
    pub(crate) const DISCONNECTED: c_int = 10;
    pub(crate) const DEVICE_REMOVAL: c_int = 11;
    pub(crate) const TIMEWAIT_EXIT: c_int = 15;
}

/// `RDMA_PS_TCP`: ports of reliable connections.
pub(crate) const PORT_SPACE_TCP: c_int = 0x0106;

shared_library::functions! {
    /// Functions of libibverbs.
    pub(crate) struct VerbsFunctions {
        ibv_query_device: fn(*mut Context, *mut DeviceAttributes) -> c_int;
        ibv_alloc_pd: fn(*mut Context) -> *mut c_void;
        ibv_dealloc_pd: fn(*mut c_void) -> c_int;
        ibv_reg_mr: fn(*mut c_void, *mut c_void, usize, c_int) -> *mut MemoryRegion;
        ibv_dereg_mr: fn(*mut MemoryRegion) -> c_int;
        ibv_create_comp_channel: fn(*mut Context) -> *mut CompletionChannel;
        ibv_destroy_comp_channel: fn(*mut CompletionChannel) -> c_int;
        ibv_create_cq: fn(*mut Context, c_int, *mut c_void, *mut CompletionChannel, c_int) -> *mut CompletionQueue;
        ibv_destroy_cq: fn(*mut CompletionQueue) -> c_int;
        ibv_get_cq_event: fn(*mut CompletionChannel, *mut *mut CompletionQueue, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events: fn(*mut CompletionQueue, c_uint);
        ibv_create_srq: fn(*mut c_void, *mut SharedReceiveAttributes) -> *mut c_void;
        ibv_destroy_srq: fn(*mut c_void) -> c_int;
    }
}

shared_library::functions! {
    /// Functions of librdmacm.
    pub(crate) struct CmFunctions {
        rdma_create_event_channel: fn() -> *mut CmChannel;
        rdma_destroy_event_channel: fn(*mut CmChannel);
        rdma_create_id: fn(*mut CmChannel, *mut *mut CmId, *mut c_void, c_int) -> c_int;
        rdma_destroy_id: fn(*mut CmId) -> c_int;
        rdma_bind_addr: fn(*mut CmId, *mut libc::sockaddr) -> c_int;
        rdma_listen: fn(*mut CmId, c_int) -> c_int;
        rdma_get_src_port: fn(*mut CmId) -> u16;
        rdma_get_cm_event: fn(*mut CmChannel, *mut *mut CmEventRecord) -> c_int;
        rdma_ack_cm_event: fn(*mut CmEventRecord) -> c_int;
        rdma_migrate_id: fn(*mut CmId, *mut CmChannel) -> c_int;
        rdma_create_qp: fn(*mut CmId, *mut c_void, *mut QueuePairAttributes) -> c_int;
        rdma_destroy_qp: fn(*mut CmId);
        rdma_resolve_addr: fn(*mut CmId, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
        rdma_resolve_route: fn(*mut CmId, c_int) -> c_int;
        rdma_connect: fn(*mut CmId, *mut ConnectionParameters) -> c_int;
        rdma_accept: fn(*mut CmId, *mut ConnectionParameters) -> c_int;
        rdma_reject: fn(*mut CmId, *const c_void, u8) -> c_int;
        rdma_disconnect: fn(*mut CmId) -> c_int;
    }
}

/// Both libraries; they stay loaded.
pub(crate) struct Functions {
    pub(crate) verbs: VerbsFunctions,
    pub(crate) cm: CmFunctions,
}

/// The libraries, which the first successful call loads.
pub(crate) fn functions() -> Result<&'static Functions, RdmaError> {
    static LOADED: OnceLock<Functions> = OnceLock::new();
    if let Some(loaded) = LOADED.get() {
        return Ok(loaded);
    }
    let verbs = VerbsFunctions::load(c"libibverbs.so.1").map_err(RdmaError::Load)?;
    let cm = CmFunctions::load(c"librdmacm.so.1").map_err(RdmaError::Load)?;
    Ok(LOADED.get_or_init(|| Functions { verbs, cm }))
}
