//! The execution of the front-end's requests.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use dma::{Pool, SharedRegion};
use wire_vhost_user::inflight::InflightDescription;
use wire_vhost_user::{
    CONFIG_BYTES_MAX, ConfigHeader, FrontendRequest, LogBase, MemoryTable, ProtocolFeatures, SingleRegion,
    U64Payload, VringAddress, VringDescriptor, VringState,
};
use wire_virtio::blk::BlkConfig;
use wire_virtio::scsi::ScsiConfig;
use wire_virtio::{Features, QUEUE_SIZE_MAX};

use crate::backend::Backend;
use crate::device::VhostDevice;
use crate::dirty_log::DirtyLog;
use crate::failure::RequestError;
use crate::inflight_region::InflightRegion;
use crate::limits::{MEMORY_REGIONS_MAX, QUEUES_MAX};
use crate::memory::{GuestMemory, GuestPlace, MemoryError, RemovedRegions};
use crate::messages::ReplyPayload;
use crate::queue::{Queue, check_size};

/// What follows from a request.
pub(crate) enum Outcome {
    /// It is acknowledged if the front-end has asked for that.
    Done,
    /// It has a reply.
    Reply(ReplyPayload),
    /// Its reply waits until a condition is met.
    Wait(ReplyCondition),
}

/// What a reply waits for.
pub(crate) enum ReplyCondition {
    /// No request in flight writes to removed memory, neither data nor its status nor its used element.
    MemoryUnused(RemovedRegions),
    /// A virtqueue has nothing in flight; it is then stopped, and its base is the reply.
    QueueIdle(usize),
    /// No request is in flight; the device is then reset.
    Idle,
}

impl Outcome {
    fn number(value: u64) -> Outcome {
        Outcome::bytes(&U64Payload { value }.to_bytes())
    }

    fn bytes(bytes: &[u8]) -> Outcome {
        Outcome::Reply(ReplyPayload { bytes: bytes.to_vec(), descriptor: None })
    }
}

/// The protocol features that are offered.
const PROTOCOL_FEATURES: ProtocolFeatures = ProtocolFeatures::MQ
    .union(ProtocolFeatures::REPLY_ACK)
    .union(ProtocolFeatures::CONFIG)
    .union(ProtocolFeatures::LOG_SHMFD)
    .union(ProtocolFeatures::BACKEND_REQ)
    .union(ProtocolFeatures::INFLIGHT_SHMFD)
    .union(ProtocolFeatures::RESET_DEVICE)
    .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS);

/// A request as it was received.
pub(crate) struct Request<'a> {
    pub(crate) payload: &'a [u8],
    pub(crate) descriptors: Vec<OwnedFd>,
}

impl Request<'_> {
    fn number(&self) -> Result<u64, RequestError> {
        U64Payload::decode(self.payload).map(|payload| payload.value).map_err(|_| RequestError::Payload)
    }

    fn state(&self) -> Result<VringState, RequestError> {
        VringState::decode(self.payload).map_err(|_| RequestError::Payload)
    }

    fn no_descriptors(&self) -> Result<(), RequestError> {
        if self.descriptors.is_empty() { Ok(()) } else { Err(RequestError::Descriptors) }
    }

    fn one_descriptor(&mut self) -> Result<OwnedFd, RequestError> {
        match (self.descriptors.pop(), self.descriptors.len()) {
            (Some(descriptor), 0) => Ok(descriptor),
            _ => Err(RequestError::Descriptors),
        }
    }

    /// A virtqueue and its eventfd.
    fn eventfd(&mut self) -> Result<(usize, Option<OwnedFd>), RequestError> {
        let which = VringDescriptor::from_bits(self.number()?);
        if which.is_absent {
            self.no_descriptors()?;
            return Ok((which.index.into(), None));
        }
        let eventfd = self.one_descriptor()?;
        if !os::is_eventfd(eventfd.as_fd()) {
            return Err(RequestError::Descriptors);
        }
        Ok((which.index.into(), Some(eventfd)))
    }
}

impl VhostDevice {
    /// Executes a request.
    ///
    /// # Errors
    /// It is rejected and has no effect.
    pub(crate) fn execute(
        &mut self,
        kind: FrontendRequest,
        mut request: Request<'_>,
        pool: &Pool,
        token: u64,
        now_ns: u64,
    ) -> Result<Outcome, RequestError> {
        use FrontendRequest as Kind;
        let takes_descriptors = matches!(
            kind,
            Kind::SetMemTable
                | Kind::SetVringKick
                | Kind::SetVringCall
                | Kind::SetVringErr
                | Kind::AddMemReg
                | Kind::RemMemReg
                | Kind::SetLogBase
                | Kind::SetLogFd
                | Kind::SetBackendReqFd
                | Kind::SetInflightFd
        );
        if !takes_descriptors {
            request.no_descriptors()?;
        }
        match kind {
            Kind::GetFeatures => return Ok(Outcome::number(self.controller.backend.features().bits())),
            Kind::SetFeatures => self.set_features(request.number()?)?,
            // A connection has one owner. The deprecated RESET_OWNER has no effect, as the specification recommends.
            Kind::SetOwner => self.has_session = true,
            Kind::ResetOwner => {}
            Kind::GetProtocolFeatures => return Ok(Outcome::number(PROTOCOL_FEATURES.bits())),
            Kind::SetProtocolFeatures => {
                let features = ProtocolFeatures::from_bits(request.number()?);
                let features = features.filter(|features| PROTOCOL_FEATURES.contains(*features));
                self.protocol_features = features.ok_or(RequestError::Feature)?;
            }
            Kind::GetQueueNum => return Ok(Outcome::number(QUEUES_MAX as u64)),
            Kind::GetMaxMemSlots => return Ok(Outcome::number(MEMORY_REGIONS_MAX as u64)),
            Kind::SetMemTable => {
                let removed = self.set_memory(request, pool)?;
                self.update_queues(now_ns);
                return Ok(Outcome::Wait(ReplyCondition::MemoryUnused(removed)));
            }
            Kind::AddMemReg => {
                let region = SingleRegion::decode(request.payload).map_err(|_| RequestError::Payload)?;
                let file = request.one_descriptor()?;
                self.memory.add(pool, region.region(), &file)?;
                self.update_queues(now_ns);
            }
            Kind::RemMemReg => {
                // Front-ends send the descriptor here too, where it is of no use.
                let region = SingleRegion::decode(request.payload).map_err(|_| RequestError::Payload)?;
                let removed = self.memory.remove(&region.region())?;
                self.update_queues(now_ns);
                return Ok(Outcome::Wait(ReplyCondition::MemoryUnused(removed)));
            }
            Kind::SetVringNum
            | Kind::SetVringAddr
            | Kind::SetVringBase
            | Kind::GetVringBase
            | Kind::SetVringEnable => return self.set_queue(kind, &request, now_ns),
            Kind::SetVringKick | Kind::SetVringCall | Kind::SetVringErr => {
                self.set_eventfd(kind, request, token, now_ns)?;
            }
            Kind::GetConfig => return self.get_config(request.payload),
            Kind::SetConfig => self.set_config(request.payload)?,
            Kind::ResetDevice => {
                self.queues.iter_mut().for_each(|queue| queue.is_stopping = true);
                return Ok(Outcome::Wait(ReplyCondition::Idle));
            }
            Kind::SetLogBase => return self.set_log(request),
            // Front-ends look at the log by themselves.
            Kind::SetLogFd => _ = request.one_descriptor()?,
            Kind::SetBackendReqFd => self.backend = Some(request.one_descriptor()?),
            Kind::GetInflightFd => return self.get_inflight(request.payload),
            Kind::SetInflightFd => self.set_inflight(request)?,
            Kind::SetVringEndian | Kind::SetStatus | Kind::GetStatus => {
                return Err(RequestError::NotSupported);
            }
        }
        Ok(Outcome::Done)
    }

    /// The reply of a request that has waited, if its condition is met.
    pub(crate) fn finish(&mut self, condition: &ReplyCondition) -> Option<Outcome> {
        match condition {
            ReplyCondition::MemoryUnused(removed) => self.is_unused(removed).then_some(Outcome::Done),
            ReplyCondition::QueueIdle(index) => {
                if self.queues.get(*index)?.in_flight > 0 {
                    return None;
                }
                self.publish_at_once();
                let value = self.queues[*index].stop();
                let state = VringState { index: *index as u32, value };
                Some(Outcome::bytes(&state.to_bytes()))
            }
            ReplyCondition::Idle => {
                if self.in_flight() > 0 {
                    return None;
                }
                self.publish_at_once();
                self.queues.clear();
                self.reset_requests();
                self.set_writeback(true);
                self.features = Features::empty();
                Some(Outcome::Done)
            }
        }
    }

    fn set_features(&mut self, bits: u64) -> Result<(), RequestError> {
        let features =
            Features::from_bits(bits).filter(|one| self.controller.backend.features().contains(*one));
        let features = features.ok_or(RequestError::Feature)?;
        // Logging begins and ends while virtqueues run.
        let changed = (features ^ self.features) - Features::VHOST_LOG_ALL;
        if !changed.is_empty() && (self.runs_elsewhere || self.running() > 0) {
            return Err(RequestError::Running);
        }
        self.features = features;
        self.has_session = true;
        Ok(())
    }

    fn set_memory(&mut self, request: Request<'_>, pool: &Pool) -> Result<RemovedRegions, RequestError> {
        let table = MemoryTable::decode(request.payload).map_err(|_| RequestError::Payload)?;
        if table.0.len() != request.descriptors.len() {
            return Err(MemoryError::Files.into());
        }
        let mut memory = GuestMemory::default();
        for (region, file) in table.0.iter().zip(&request.descriptors) {
            memory.add(pool, *region, file)?;
        }
        Ok(std::mem::replace(&mut self.memory, memory).clear())
    }

    /// A virtqueue, which exists from its first use on.
    fn queue_mut(&mut self, index: usize) -> Result<&mut Queue, RequestError> {
        if index >= QUEUES_MAX {
            return Err(RequestError::Queue);
        }
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, Queue::default);
        }
        Ok(&mut self.queues[index])
    }

    /// Requests that set a number or addresses of a virtqueue.
    fn set_queue(
        &mut self,
        kind: FrontendRequest,
        request: &Request<'_>,
        now_ns: u64,
    ) -> Result<Outcome, RequestError> {
        if kind == FrontendRequest::SetVringAddr {
            let address = VringAddress::decode(request.payload).map_err(|_| RequestError::Payload)?;
            let index = address.index as usize;
            self.queue_mut(index)?.address = Some(address);
            self.update_queue(index, now_ns);
            return Ok(Outcome::Done);
        }
        let VringState { index, value } = request.state()?;
        let index = index as usize;
        let features = self.features;
        let queue = self.queue_mut(index)?;
        let is_running = queue.ring.is_some();
        match kind {
            FrontendRequest::SetVringEnable => {
                queue.is_enabled = value != 0;
                self.wake(now_ns);
            }
            FrontendRequest::GetVringBase => {
                queue.is_stopping = true;
                return Ok(Outcome::Wait(ReplyCondition::QueueIdle(index)));
            }
            _ if is_running => return Err(RequestError::Running),
            FrontendRequest::SetVringNum => {
                let size = u16::try_from(value).ok().filter(|size| (1..=QUEUE_SIZE_MAX).contains(size));
                let size = size.ok_or(RequestError::QueueSize(value))?;
                check_size(size, features)?;
                queue.size = size;
                self.update_queue(index, now_ns);
            }
            _ => queue.base = value,
        }
        Ok(Outcome::Done)
    }

    /// Requests that set an eventfd of a virtqueue. A kick starts it.
    fn set_eventfd(
        &mut self,
        kind: FrontendRequest,
        mut request: Request<'_>,
        token: u64,
        now_ns: u64,
    ) -> Result<(), RequestError> {
        let (index, eventfd) = request.eventfd()?;
        let (notifications, features) = (self.notifications.clone(), self.features);
        let queue = self.queue_mut(index)?;
        match kind {
            FrontendRequest::SetVringCall => {
                queue.call = eventfd;
                // The driver may have missed a notification, of an earlier back-end or before there was an eventfd.
                if let (Some(call), true) = (&queue.call, queue.ring.is_some()) {
                    notifications.signal(call.as_fd());
                }
            }
            FrontendRequest::SetVringErr => queue.error = eventfd,
            _ => {
                queue.check_start(features)?;
                queue.kick = eventfd.and_then(|eventfd| notifications.watch(eventfd, token));
                queue.is_started = true;
                self.update_queue(index, now_ns);
            }
        }
        Ok(())
    }

    /// Sets the log of dirty pages. Front-ends wait for a reply.
    fn set_log(&mut self, mut request: Request<'_>) -> Result<Outcome, RequestError> {
        let LogBase { size, mmap_offset } =
            LogBase::decode(request.payload).map_err(|_| RequestError::Payload)?;
        let file = request.one_descriptor()?;
        let mapped = SharedRegion::map_peer_memory(file.as_fd(), mmap_offset, size);
        let (region, offset) = mapped.map_err(MemoryError::Map)?;
        self.dirty_log = Some(DirtyLog::new(GuestPlace { region: Rc::new(region), offset }, size));
        Ok(Outcome::number(0))
    }

    /// Makes memory for requests in flight. The reply is as long as the request, which has padding.
    fn get_inflight(&self, payload: &[u8]) -> Result<Outcome, RequestError> {
        let description = InflightDescription::decode(payload).map_err(|_| RequestError::Payload)?;
        let (description, file) = InflightRegion::create(&description, self.features)?;
        let mut bytes = description.to_bytes().to_vec();
        bytes.resize(payload.len(), 0);
        Ok(Outcome::Reply(ReplyPayload { bytes, descriptor: Some(file) }))
    }

    /// Sets memory of requests in flight, for virtqueues that start afterwards, and the cache's mode that is in it.
    fn set_inflight(&mut self, mut request: Request<'_>) -> Result<(), RequestError> {
        let description = InflightDescription::decode(request.payload).map_err(|_| RequestError::Payload)?;
        let file = request.one_descriptor()?;
        let inflight = InflightRegion::open(&description, &file)?;
        if inflight.is_write_through(self.features) {
            self.writeback = false;
        } else {
            inflight.set_write_through(!self.writeback, self.features);
        }
        self.inflight = Some(inflight);
        Ok(())
    }

    /// Sets the mode of the device's cache, which the next process finds again.
    fn set_writeback(&mut self, writeback: bool) {
        self.writeback = writeback;
        if let Some(inflight) = &self.inflight {
            inflight.set_write_through(!writeback, self.features);
        }
    }

    /// Reads the configuration space. A range that is not there is answered without bytes.
    fn get_config(&self, payload: &[u8]) -> Result<Outcome, RequestError> {
        let header = ConfigHeader::decode(payload).map_err(|_| RequestError::Payload)?;
        let (offset, size) = (header.offset as usize, header.size as usize);
        if size > CONFIG_BYTES_MAX || offset > CONFIG_BYTES_MAX - size {
            return Ok(Outcome::bytes(&[]));
        }
        // What is behind the device's fields reads as zeroes.
        let mut space = [0; CONFIG_BYTES_MAX];
        let fields = self.controller.backend.config_space(self.writeback);
        space[..fields.len()].copy_from_slice(&fields);
        let bytes = [&header.to_bytes(), &space[offset..offset + size]].concat();
        Ok(Outcome::bytes(&bytes))
    }

    /// Writes the configuration space: of a block device, the cache's mode; of a SCSI host, the lengths of CDBs and sense
    /// data, which remain what they are.
    fn set_config(&mut self, payload: &[u8]) -> Result<(), RequestError> {
        let header = ConfigHeader::decode(payload).map_err(|_| RequestError::Payload)?;
        let bytes = &payload[ConfigHeader::SIZE..];
        if let Backend::Scsi(_) = self.controller.backend {
            let space = self.controller.backend.config_space(self.writeback);
            let place = header.offset as usize..(header.offset as usize).saturating_add(bytes.len());
            let is_writable = place.start >= ScsiConfig::SENSE_SIZE && place.end <= ScsiConfig::CDB_SIZE + 4;
            let is_same =
                is_writable && space.get(place) == Some(bytes) && header.size as usize == bytes.len();
            return if is_same { Ok(()) } else { Err(RequestError::Payload) };
        }
        match (header.offset as usize, bytes) {
            (BlkConfig::WRITEBACK, [writeback @ (0 | 1)]) if header.size == 1 => {
                self.set_writeback(*writeback == 1);
                Ok(())
            }
            _ => Err(RequestError::Payload),
        }
    }
}
