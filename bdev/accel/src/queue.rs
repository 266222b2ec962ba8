//! Operations that a device executes: a core's requests to it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use dma::{Buffer, Data, RegionMapping, RegionState};
use ioat::IoatOp;
use reactor::Core;

use crate::engine::AccelInner;
use crate::ioat_engine::{IoatPort, PortUser};
use crate::{AccelOp, DeviceOutcome, Engine};

type Request = block_io::Request<Data>;

/// The ports of a core: one for each framework, of which a program has one.
#[derive(Default)]
struct CorePorts(RefCell<Vec<Rc<IoatPort>>>);

/// Copies and fills of one user on one core, by a device that executes them while the core does other work.
///
/// Order of calls: [`takes`](Self::takes) an operation, which is false whenever the CPU is to execute it; the
/// addresses of its memory, from [`buffer_address`](Self::buffer_address) and
/// [`region_address`](Self::region_address); [`submit`](Self::submit), then [`flush`](Self::flush) once a
/// batch; [`poll`](Self::poll) until all have come back. A request owns the memory that the device writes.
/// What a device has not executed comes back as well, for the CPU.
pub struct AccelQueue {
    inner: Arc<AccelInner>,
    core: Core,
    port: Rc<IoatPort>,
    user: PortUser,
    in_flight: usize,
}

/// Where a device sees a region of memory, as a user of it remembers.
#[derive(Default)]
pub struct KnownRegion {
    /// For the device of this generation; `None` if that cannot be reached.
    known: Option<(u32, Option<u64>)>,
}

impl AccelQueue {
    pub(crate) fn new(inner: Arc<AccelInner>, core: &Core) -> AccelQueue {
        let ports = core.local::<CorePorts>();
        let mut ports = ports.0.borrow_mut();
        let port = ports.iter().find(|port| port.is_of(&inner)).cloned().unwrap_or_else(|| {
            let port = Rc::new(IoatPort::new(inner.clone()));
            ports.push(port.clone());
            port
        });
        let user = port.attach();
        AccelQueue { inner, core: core.clone(), port, user, in_flight: 0 }
    }

    /// Whether a device executes an operation now: one is assigned, and this core has one that takes
    /// requests.
    #[inline]
    pub fn takes(&self, op: AccelOp) -> bool {
        self.inner.assigned.is(op, Engine::Ioat) && self.port.is_ready(&self.core)
    }

    /// Where the device sees a buffer; `None` if it does not.
    pub fn buffer_address(&self, buffer: &Buffer) -> Option<u64> {
        self.port.buffer_address(buffer)
    }

    /// Where the device sees a region; `None` if it does not, or not yet: a thread maps it from the first
    /// call on.
    pub fn region_address(&self, region: &Arc<RegionMapping>, known: &mut KnownRegion) -> Option<u64> {
        let generation = self.port.generation();
        if let Some((of, address)) = known.known
            && of == generation
        {
            return address;
        }
        match self.port.region_address(region)? {
            RegionState::Pending => None,
            RegionState::Mapped(address) => {
                known.known = Some((generation, Some(address)));
                Some(address)
            }
            RegionState::Unmapped => {
                known.known = Some((generation, None));
                None
            }
        }
    }

    /// Queues a request that consists of these operations, which it takes. `memory` is what the device
    /// reads or writes besides the request's own, unless it outlives the device's use for another reason.
    ///
    /// # Errors
    /// The request, for the CPU: the device takes no more.
    pub fn submit(
        &mut self,
        parts: &mut Vec<IoatOp>,
        request: Request,
        memory: Option<Rc<Vec<Buffer>>>,
    ) -> Result<(), Request> {
        self.port.queue(self.user, parts, request, memory)?;
        self.in_flight += 1;
        Ok(())
    }

    /// Gives the device what was queued.
    pub fn flush(&self) {
        self.port.flush();
    }

    /// Requests that have not come back.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Returns the requests that the device is done with.
    pub fn poll(&mut self, sink: &mut Vec<DeviceOutcome>) {
        if self.in_flight > 0 {
            let before = sink.len();
            self.port.poll(self.user, self.core.now_ns(), sink);
            self.in_flight -= sink.len() - before;
        }
    }
}

impl Drop for AccelQueue {
    fn drop(&mut self) {
        self.port.detach(self.user);
    }
}
