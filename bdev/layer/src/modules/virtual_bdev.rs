//! The half that virtual devices share: whatever a [`VirtualBdev`] does not define itself is that of its base, and a
//! [`BaseChannel`] forwards its requests.

use block_io::{Channel as _, Op};

use super::base::BaseBdev;
use crate::{
    Bdev, BdevChannel, BdevError, BdevGeometry, BoxedChannel, Completion, Durability, InfoValue, IoLimits,
    Request,
};

/// A module on top of one base bdev, which it claims. Its [`Bdev`] supports the operations of the base, and resets.
pub(super) trait VirtualBdev: Send + Sync + 'static {
    /// See [`Bdev::product_name`].
    const PRODUCT_NAME: &'static str;

    fn base(&self) -> &BaseBdev;

    /// Opens the module's channel on top of one of the base.
    fn open_on(&self, base: BaseChannel, core: &reactor::Core) -> BoxedChannel;

    /// See [`Bdev::driver_specific`].
    fn describe(&self) -> Vec<(&'static str, InfoValue)>;

    /// See [`Bdev::registered_page_alignment`]; `None` for a module that looks at data.
    fn registered_page_alignment(&self) -> Option<u32> {
        self.base().device().bdev().registered_page_alignment()
    }

    /// See [`Bdev::on_removed`].
    fn removed(&self) {}
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
        op == Op::Reset || self.base().device().bdev().supports(op)
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

    fn on_removed(&self) {
        self.removed();
    }

    fn on_closed(&self) {
        self.base().release();
    }
}

/// A channel of the base with the requests that wait for room in it. Requests are pushed, and reach the base in the
/// next [`submit`](Self::submit) or [`poll`](Self::poll).
pub(super) struct BaseChannel {
    channel: BdevChannel,
    requests: Vec<Request>,
    /// Scratch of [`poll`](Self::poll); empty between calls.
    completions: Vec<Completion>,
}

impl BaseChannel {
    pub(super) fn new(channel: BdevChannel) -> BaseChannel {
        BaseChannel { channel, requests: Vec::new(), completions: Vec::new() }
    }

    /// The channel alone, for a module that changes no request.
    pub(super) fn into_channel(self) -> BdevChannel {
        self.channel
    }

    pub(super) fn push(&mut self, request: Request) {
        self.requests.push(request);
    }

    pub(super) fn append(&mut self, batch: &mut Vec<Request>) {
        self.requests.append(batch);
    }

    /// Submits what the base has room for.
    pub(super) fn submit(&mut self) {
        self.channel.submit(&mut self.requests);
    }

    /// Submits waiting requests, and returns the completions of the base.
    pub(super) fn poll(&mut self) -> std::vec::Drain<'_, Completion> {
        self.submit();
        self.channel.poll(&mut self.completions);
        self.completions.drain(..)
    }

    /// The base's deadline; now, if requests wait and no completion of the base will make room for them.
    pub(super) fn deadline(&self) -> Option<u64> {
        if !self.requests.is_empty() && self.channel.outstanding() == 0 {
            return Some(0);
        }
        self.channel.deadline()
    }
}
