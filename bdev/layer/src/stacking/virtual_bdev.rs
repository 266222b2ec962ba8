//! Devices on one base: whatever a [`VirtualBdev`] does not define itself is that of its base, and a
//! [`BaseChannel`] forwards its requests.

use std::sync::Arc;

use block_io::{Channel as _, Op};
use uuid::Uuid;

use super::BaseBdev;
use crate::{
    Bdev, BdevChannel, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Completion, Durability, InfoValue,
    IoLimits, Registry, Request,
};

/// A device on one base, which it claims, and with which it goes.
pub trait VirtualBdev: Send + Sync + 'static {
    /// See [`Bdev::product_name`].
    const PRODUCT_NAME: &'static str;

    /// The base.
    fn base(&self) -> &BaseBdev;

    /// Opens the module's channel on top of one of the base.
    fn open_on(&self, base: BaseChannel, core: &reactor::Core) -> BoxedChannel;

    /// See [`Bdev::driver_specific`].
    fn describe(&self) -> Vec<(&'static str, InfoValue)>;

    /// See [`Bdev::supports`]; by default the operations of the base, and resets.
    fn supports(&self, op: Op) -> bool {
        op == Op::Reset || self.base().device().bdev().supports(op)
    }

    /// See [`Bdev::registered_page_alignment`]; `None` for a module that looks at data.
    fn registered_page_alignment(&self) -> Option<u32> {
        self.base().device().bdev().registered_page_alignment()
    }

    /// See [`Bdev::on_removed`].
    fn removed(&self) {}

    /// See [`Bdev::on_closed`]: no channel is open or will be. The base is released after it.
    fn closed(&self) {}
}

impl<T: VirtualBdev> Bdev for T {
    fn product_name(&self) -> &'static str {
        T::PRODUCT_NAME
    }

    fn geometry(&self) -> BdevGeometry {
        self.base().device().geometry()
    }

    fn durability(&self) -> Durability {
        self.base().device().durability()
    }

    fn supports(&self, op: Op) -> bool {
        VirtualBdev::supports(self, op)
    }

    fn io_limits(&self) -> IoLimits {
        // The base's channel divides what its module does not take.
        IoLimits::NONE
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        Ok(self.open_on(BaseChannel::new(self.base().channel(core)?), core))
    }

    fn registered_page_alignment(&self) -> Option<u32> {
        VirtualBdev::registered_page_alignment(self)
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        self.describe()
    }

    fn reads_undefined(&self) -> bool {
        self.base().device().bdev().reads_undefined()
    }

    fn read_only(&self) -> bool {
        self.base().device().bdev().read_only()
    }

    fn depth(&self) -> u32 {
        self.base().device().bdev().depth()
    }

    fn abort_in_flight(&self) {
        self.base().device().bdev().abort_in_flight();
    }

    fn on_removed(&self) {
        self.removed();
    }

    fn on_closed(&self) {
        self.closed();
        self.base().release();
    }
}

/// Creates a device of the kind of bdevs `kind` on a base, which it claims. `make` returns its UUID and the
/// module's object.
///
/// # Errors
/// [`BdevError::NotFound`] with `base` as it is given; [`BdevError::Claimed`]; [`BdevError::Exists`] if the
/// name or the UUID is in use.
pub fn create_on<T: VirtualBdev>(
    registry: &Registry,
    kind: &str,
    base: &str,
    name: &str,
    make: impl FnOnce(BaseBdev) -> (Uuid, T),
) -> Result<Arc<BlockDevice>, BdevError> {
    let base = BaseBdev::claim(registry, base, &format!("{kind} bdev {name}"))?;
    let below = base.device().clone();
    let (uuid, module) = make(base);
    let device = registry.register(name, Some(uuid), &[], Arc::new(module))?;
    registry.stack(&below, &device);
    Ok(device)
}

/// A channel of a base with the requests that wait for room in it. Requests are pushed, and reach the base in
/// the next [`submit`](Self::submit) or [`poll`](Self::poll).
pub struct BaseChannel {
    channel: BdevChannel,
    requests: Vec<Request>,
    in_flight: usize,
    /// Empty between calls of [`poll`](Self::poll).
    completions: Vec<Completion>,
}

impl BaseChannel {
    /// The channel of a base for one user, which polls it alone.
    pub fn new(channel: BdevChannel) -> BaseChannel {
        BaseChannel { channel, requests: Vec::new(), in_flight: 0, completions: Vec::new() }
    }

    /// The channel alone, for a module that changes no request.
    ///
    /// # Panics
    /// If requests were pushed.
    pub fn into_channel(self) -> BdevChannel {
        assert!(self.is_idle(), "{} requests have no owner any more", self.requests.len() + self.in_flight);
        self.channel
    }

    /// Adds a request. Its tag comes back with the completion.
    pub fn push(&mut self, request: Request) {
        self.requests.push(request);
    }

    /// Adds all requests of a batch.
    pub fn append(&mut self, batch: &mut Vec<Request>) {
        self.requests.append(batch);
    }

    /// Submits all requests of a batch after those that wait. Unlike [`append`](Self::append), it moves them
    /// only if they have to wait.
    #[inline]
    pub fn submit_batch(&mut self, batch: &mut Vec<Request>) {
        if !self.requests.is_empty() {
            self.append(batch);
            return self.submit();
        }
        let before = batch.len();
        self.channel.submit(batch);
        self.in_flight += before - batch.len();
        self.requests.append(batch);
    }

    /// Submits what the base has room for.
    pub fn submit(&mut self) {
        let before = self.requests.len();
        self.channel.submit(&mut self.requests);
        self.in_flight += before - self.requests.len();
    }

    /// Submits waiting requests, and returns the completions of the base.
    pub fn poll(&mut self) -> std::vec::Drain<'_, Completion> {
        self.submit();
        self.in_flight -= self.channel.poll(&mut self.completions);
        self.completions.drain(..)
    }

    /// As [`poll`](Self::poll), but appends the completions to a sink. Returns their number.
    #[inline]
    pub fn poll_into(&mut self, sink: &mut Vec<Completion>) -> usize {
        if !self.requests.is_empty() {
            self.submit();
        }
        let count = self.channel.poll(sink);
        self.in_flight -= count;
        count
    }

    /// Whether every request that was pushed has completed.
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.requests.is_empty()
    }

    /// The base's deadline; now, if requests wait and no completion of the base will make room for them.
    pub fn deadline(&self) -> Option<u64> {
        if !self.requests.is_empty() && self.in_flight == 0 {
            return Some(0);
        }
        self.channel.deadline()
    }
}
