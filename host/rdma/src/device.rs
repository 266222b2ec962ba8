//! A device as one core uses it: its completion queue, its receive buffers and its registered memory.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use dma::{Buffer, ChunkMemory, DeviceAddresses, DeviceMappings, Dma, DmaError, MappingConfig};
use reactor::Core;

use crate::RdmaError;
use crate::connection_manager::OwnedId;
use crate::functions::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE, CompletionChannel, CompletionQueue, Context, DeviceAttributes,
    Functions, LocalRange, MemoryRegion, SharedReceiveAttributes, WorkCompletion,
};
use crate::receive_buffers::ReceiveBuffers;

/// Completions that are taken from the device at a time.
const POLL_MAX: usize = 32;
/// Page size of registered memory.
const PAGE_BYTES: u64 = 4096;

/// A device on one core.
///
/// Connections hold it. Its queues are destroyed when the last of them is gone.
pub(crate) struct RdmaDevice {
    functions: &'static Functions,
    context: NonNull<Context>,
    attributes: DeviceAttributes,
    srq: NonNull<c_void>,
    cq: NonNull<CompletionQueue>,
    channel: NonNull<CompletionChannel>,
    /// Entries of the completion queue that no connection has reserved.
    free_entries: Cell<u32>,
    /// The completion queue notifies of its next entry.
    is_armed: Cell<bool>,
    /// Notifications that were read, and are to be acknowledged before the queue is destroyed.
    unacknowledged: Cell<u32>,
    memory: RefCell<RegisteredMemory>,
    /// Set by [`open`](Self::open). Dropped after the queue that the device receives into them from.
    receives: RefCell<Option<ReceiveBuffers>>,
    mappings: Arc<DeviceMappings<ProtectionDomain>>,
}

/// What a device is opened with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceConfig {
    /// Receive buffers, and their size in bytes.
    pub(crate) receives: u32,
    pub(crate) message_bytes: usize,
    /// Entries of the completion queue at most, those of receive buffers included.
    pub(crate) entries_max: u32,
    pub(crate) access: MemoryAccess,
}

/// Who accesses registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryAccess {
    /// The device, for requests of this end.
    Own,
    /// The peer too, with the key that it was given: every chunk of which it was given a buffer.
    OfPeer,
}

/// Where the device sees the core's buffers, and with which keys.
struct RegisteredMemory {
    addresses: DeviceAddresses<ProtectionDomain>,
    /// Local and remote keys by index of the chunk; 0 is not known yet.
    keys: Vec<(u32, u32)>,
}

impl RdmaDevice {
    /// The device of a connection. It has fewer receive buffers and entries than wanted if its limits are
    /// lower.
    ///
    /// # Errors
    /// The device lacks a resource.
    pub(crate) fn open(
        core: &Core,
        id: &OwnedId,
        config: &DeviceConfig,
    ) -> Result<Rc<RdmaDevice>, RdmaError> {
        let DeviceConfig { receives, message_bytes, entries_max, access } = *config;
        let functions = id.functions();
        // A request to connect has a device, whose context librdmacm keeps open.
        let context = NonNull::new(id.context());
        let context = context.ok_or_else(|| RdmaError::last("finding the device"))?;
        let attributes = query(functions, context)?;
        // SAFETY: the context is open.
        let pd = NonNull::new(unsafe { (functions.verbs.ibv_alloc_pd)(context.as_ptr()) });
        let pd = pd.ok_or_else(|| RdmaError::last("allocating a protection domain"))?;
        let domain = ProtectionDomain { functions, pd, access, regions: Mutex::default() };
        let config =
            MappingConfig { name: "the RDMA device".into(), log_target: "rdma", map_lent_memory: false };
        let mappings = DeviceMappings::new(Box::new(domain), config);
        let entries = attributes.cqe_max.clamp(1, i32::try_from(entries_max).unwrap_or(i32::MAX));
        // SAFETY: the context is open.
        let channel = NonNull::new(unsafe { (functions.verbs.ibv_create_comp_channel)(context.as_ptr()) });
        let channel = channel.ok_or_else(|| RdmaError::last("opening a channel of completions"))?;
        // SAFETY: the context and the channel are open.
        let cq = NonNull::new(unsafe {
            (functions.verbs.ibv_create_cq)(context.as_ptr(), entries, ptr::null_mut(), channel.as_ptr(), 0)
        });
        let Some(cq) = cq else {
            let error = RdmaError::last("making a completion queue");
            // SAFETY: nothing uses the channel.
            unsafe { (functions.verbs.ibv_destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let mut wanted = SharedReceiveAttributes {
            context: ptr::null_mut(),
            wr_max: receives.min(attributes.srq_wr_max.max(1) as u32),
            sge_max: 1,
            limit: 0,
        };
        // SAFETY: the protection domain is open.
        let srq = NonNull::new(unsafe { (functions.verbs.ibv_create_srq)(pd.as_ptr(), &mut wanted) });
        let Some(srq) = srq else {
            let error = RdmaError::last("making a shared receive queue");
            // SAFETY: nothing uses the queue.
            unsafe { (functions.verbs.ibv_destroy_cq)(cq.as_ptr()) };
            // SAFETY: nothing uses the channel.
            unsafe { (functions.verbs.ibv_destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let addresses = DeviceAddresses::new(&mappings, core.pool().arena(), PAGE_BYTES);
        let device = RdmaDevice {
            functions,
            context,
            attributes,
            srq,
            cq,
            channel,
            free_entries: Cell::new((entries as u32).saturating_sub(receives)),
            is_armed: Cell::new(false),
            unacknowledged: Cell::new(0),
            memory: RefCell::new(RegisteredMemory { addresses, keys: Vec::new() }),
            receives: RefCell::default(),
            mappings,
        };
        let buffers =
            ReceiveBuffers::new(core, |buffer| device.locate(buffer), wanted.wr_max, message_bytes)?;
        *device.receives.borrow_mut() = Some(buffers);
        device.post_receives();
        rustix::io::ioctl_fionbio(device.as_fd(), true).map_err(|error| {
            RdmaError::Call("setting the channel of completions to not block", error.into())
        })?;
        Ok(Rc::new(device))
    }

    pub(crate) fn functions(&self) -> &'static Functions {
        self.functions
    }

    pub(crate) fn context(&self) -> &Context {
        // SAFETY: librdmacm keeps the context open, and changes none of its fields that are used.
        unsafe { self.context.as_ref() }
    }

    /// The address of its context, by which connections of the same device are found.
    pub(crate) fn key(&self) -> usize {
        self.context.as_ptr().addr()
    }

    /// The [`key`](Self::key) of the device of a connection.
    pub(crate) fn key_of(id: &OwnedId) -> usize {
        id.context().addr()
    }

    pub(crate) fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    pub(crate) fn pd(&self) -> *mut c_void {
        self.mappings.device().pd.as_ptr()
    }

    pub(crate) fn cq(&self) -> *mut CompletionQueue {
        self.cq.as_ptr()
    }

    pub(crate) fn srq(&self) -> *mut c_void {
        self.srq.as_ptr()
    }

    /// Reserves entries of the completion queue for a connection, which [`release`](Self::release)s them.
    pub(crate) fn reserve(&self, entries: u32) -> bool {
        let left = self.free_entries.get().checked_sub(entries);
        left.inspect(|left| self.free_entries.set(*left)).is_some()
    }

    pub(crate) fn release(&self, entries: u32) {
        self.free_entries.set(self.free_entries.get() + entries);
    }

    /// Appends completions; returns their number, 32 at most.
    pub(crate) fn poll(&self, out: &mut Vec<WorkCompletion>) -> usize {
        let mut found = [WorkCompletion::default(); POLL_MAX];
        // SAFETY: the queue is open, and there is space for `POLL_MAX` completions.
        let count =
            unsafe { self.context().poll_cq()(self.cq.as_ptr(), POLL_MAX as c_int, found.as_mut_ptr()) };
        // A negative result is a failed device, whose connections the connection manager ends.
        let count = usize::try_from(count).unwrap_or(0);
        out.extend_from_slice(&found[..count]);
        count
    }

    /// Has the device notify of its next completion. What has completed before is to be polled afterwards.
    /// Returns whether it was not armed.
    pub(crate) fn arm(&self) -> bool {
        if self.is_armed.replace(true) {
            return false;
        }
        // SAFETY: the queue is open.
        unsafe { self.context().req_notify_cq()(self.cq.as_ptr(), 0) };
        true
    }

    pub(crate) fn is_armed(&self) -> bool {
        self.is_armed.get()
    }

    /// Copies bytes of a received message.
    pub(crate) fn copy_message(&self, index: u32, offset: usize, out: &mut [u8]) {
        if let Some(receives) = &*self.receives.borrow() {
            receives.copy(index, offset, out);
        }
    }

    /// Takes the buffer of a message back.
    pub(crate) fn release_message(&self, index: u32) {
        if let Some(receives) = &mut *self.receives.borrow_mut() {
            receives.release(index);
        }
    }

    /// Gives the device the buffers that were taken back.
    pub(crate) fn post_receives(&self) {
        if let Some(receives) = &mut *self.receives.borrow_mut() {
            receives.post(self.context(), self.srq());
        }
    }

    /// Reads the notifications that have come.
    pub(crate) fn take_notifications(&self) {
        loop {
            let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is open, does not block, and the results are places for pointers.
            let read = unsafe {
                (self.functions.verbs.ibv_get_cq_event)(self.channel.as_ptr(), &mut cq, &mut context)
            };
            if read != 0 {
                return;
            }
            self.is_armed.set(false);
            self.unacknowledged.set(self.unacknowledged.get() + 1);
        }
    }

    /// Where the device sees the first byte of a buffer, and with which key.
    ///
    /// # Errors
    /// It is no memory of the core's pools, or the device refuses to register it.
    pub(crate) fn locate(&self, buffer: &Buffer) -> Result<LocalRange, DmaError> {
        self.locate_for_peer(buffer).map(|(range, _)| range)
    }

    /// As [`locate`](Self::locate), with the key for the peer.
    pub(crate) fn locate_for_peer(&self, buffer: &Buffer) -> Result<(LocalRange, u32), DmaError> {
        let mut memory = self.memory.borrow_mut();
        let found = memory.addresses.address(buffer)?;
        let at = found.chunk as usize;
        if memory.keys.len() <= at {
            memory.keys.resize(at + 1, (0, 0));
        }
        if memory.keys[at] == (0, 0) {
            memory.keys[at] = self.mappings.device().keys(found.chunk);
        }
        let length = u32::try_from(buffer.len()).unwrap_or(u32::MAX);
        let (key, remote_key) = memory.keys[at];
        Ok((LocalRange { address: found.address, length, key }, remote_key))
    }
}

impl AsFd for RdmaDevice {
    /// Readable when the device has notified of a completion.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open as long as `self`.
        let fd = unsafe { self.channel.as_ref() }.fd;
        // SAFETY: the descriptor is the channel's.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for RdmaDevice {
    fn drop(&mut self) {
        let verbs = &self.functions.verbs;
        // SAFETY: the queue pairs that used it are destroyed, as each holds the device.
        unsafe { (verbs.ibv_destroy_srq)(self.srq.as_ptr()) };
        // SAFETY: this many notifications were read.
        unsafe { (verbs.ibv_ack_cq_events)(self.cq.as_ptr(), self.unacknowledged.get()) };
        // SAFETY: no queue uses it, and its notifications are acknowledged. The protection domain is
        // destroyed after this.
        unsafe { (verbs.ibv_destroy_cq)(self.cq.as_ptr()) };
        // SAFETY: its completion queue is destroyed.
        unsafe { (verbs.ibv_destroy_comp_channel)(self.channel.as_ptr()) };
    }
}

fn query(functions: &Functions, context: NonNull<Context>) -> Result<DeviceAttributes, RdmaError> {
    // SAFETY: zero bytes are a valid value.
    let mut attributes: DeviceAttributes = unsafe { std::mem::zeroed() };
    // SAFETY: the context is open, and the result is a place for the structure.
    match unsafe { (functions.verbs.ibv_query_device)(context.as_ptr(), &mut attributes) } {
        0 => Ok(attributes),
        _ => Err(RdmaError::last("asking the device for its limits")),
    }
}

/// Memory that one core has registered with a device.
pub(crate) struct ProtectionDomain {
    functions: &'static Functions,
    pd: NonNull<c_void>,
    access: MemoryAccess,
    /// By index of the chunk.
    regions: Mutex<Vec<(u32, Registration)>>,
}

/// A registered chunk.
struct Registration(NonNull<MemoryRegion>);

// SAFETY: calls of libibverbs may be made on any thread.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above; the list has a lock.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// The local and the remote key of a chunk that is mapped.
    fn keys(&self, chunk: u32) -> (u32, u32) {
        let regions = sync::lock(&self.regions);
        let found = regions.iter().find(|(index, _)| *index == chunk);
        // SAFETY: the region is registered until the drop of `self`.
        let region = found.map(|(_, region)| unsafe { region.0.as_ref() });
        region.map_or((0, 0), |region| (region.lkey, region.rkey))
    }
}

impl Dma for ProtectionDomain {
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DmaError> {
        // SAFETY: the chunk stays mapped until the mappings of the device are dropped, which is after the
        // regions.
        let region = NonNull::new(unsafe {
            (self.functions.verbs.ibv_reg_mr)(
                self.pd.as_ptr(),
                chunk.start.cast(),
                chunk.bytes,
                match self.access {
                    MemoryAccess::Own => ACCESS_LOCAL_WRITE,
                    MemoryAccess::OfPeer => ACCESS_LOCAL_WRITE | ACCESS_REMOTE,
                },
            )
        });
        let region = region.ok_or_else(|| {
            let error = std::io::Error::last_os_error();
            DmaError::Refused(format!(
                "registering memory with the RDMA device: {error}; see the limit of locked memory (ulimit -l)"
            ))
        })?;
        sync::lock(&self.regions).push((chunk.index, Registration(region)));
        Ok(chunk.start.addr() as u64)
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        for (_, region) in sync::lock(&self.regions).drain(..) {
            // SAFETY: no queue pair is left that could use it.
            unsafe { (self.functions.verbs.ibv_dereg_mr)(region.0.as_ptr()) };
        }
        // SAFETY: nothing of it is left.
        unsafe { (self.functions.verbs.ibv_dealloc_pd)(self.pd.as_ptr()) };
    }
}
