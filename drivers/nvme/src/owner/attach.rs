//! Attaching a controller: from a device to an identified controller with events on their way.

use std::rc::Rc;
use std::sync::Arc;

use memory::DeviceBuffer;
use reactor::{Core, Period};
use sys::clock::now_ns;
use wire_nvme::admin::{Identify, SetFeatures};
use wire_nvme::doorbell::{DOORBELLS_OFFSET, DoorbellBuffer};
use wire_nvme::feature::{FeatureId, NumberOfQueues};
use wire_nvme::identify::{
    self, Cns, Csi, IdentifyController, IdentifyNamespace, NamespaceDescriptor, NvmController, oacs,
};
use wire_nvme::registers::{Arbitration, Capabilities, CommandSets, Configuration, Version};
use wire_nvme::{Sqe, cqe, sqe};

use super::{ADMIN_DEPTH, ADMIN_ENTRIES, ASKS_MAX, Owner, OwnerPoller};
use crate::controller::Controller;
use crate::device::{Device, DeviceError, Doorbells};
use crate::dma::Translator;
use crate::error::{AdminError, Failure, OpenError};
use crate::namespace_info::NamespaceInfo;
use crate::options::{Interrupts, Options};
use crate::queue::Queue;
use crate::rings::Rings;
use crate::shadow::ShadowPages;
use crate::shared::{AdminData, Facts, Shared, State};

/// I/O queues that are asked for: one a core, on all machines but the largest.
const QUEUES_WANTED: u32 = 64;
/// The largest page that our buffers are aligned to wherever it matters: 64 KiB.
const PAGE_LOG2_MAX: u8 = 16;

/// Takes a controller over, on the core that will own it.
pub(crate) async fn attach(
    core: &Core,
    device: Box<dyn Device>,
    options: &Options,
) -> Result<Controller, OpenError> {
    let (sender, asks) = core.mailbox(ASKS_MAX);
    let shared = Shared::new(device, options.clone(), sender);
    shared.keep(core.pool().arena());
    let name = shared.device().name();
    let owner = Owner::new(core, &shared, asks);
    core.add_poller(Box::new(OwnerPoller { owner: owner.clone(), name: name.clone() }), Period::EveryTurn);
    match owner.bring_up(&name).await {
        Ok(()) => Ok(Controller::new(shared)),
        Err(error) => {
            shared.set_failure(shared.failure().unwrap_or(Failure::Detached));
            owner.let_go();
            owner.over.set(true);
            Err(error)
        }
    }
}

impl Owner {
    async fn bring_up(self: &Rc<Self>, name: &str) -> Result<(), OpenError> {
        let device = self.shared.device();
        let at_device = |error| OpenError::Device(name.to_string(), error);
        device.start().map_err(at_device)?;
        let capabilities = self.registers().capabilities()?;
        let version = self.registers().version()?;
        let page_log2 = usable(&capabilities)?;
        // Doorbells of the admin queue and one I/O queue at least.
        let stride = 4u64 << capabilities.doorbell_stride_log2;
        let need = 4 * stride;
        let doorbells = device.doorbells(need).map_err(at_device)?;
        let room = doorbells.region.len().saturating_sub(doorbells.offset).min(doorbells.bytes);
        if room < need {
            let base = u64::from(DOORBELLS_OFFSET);
            return Err(at_device(DeviceError::BarTooSmall { have: base + room, need: base + need }));
        }
        let doorbells = Doorbells { bytes: room, ..doorbells };
        self.make_admin_queue(&capabilities, page_log2, &doorbells)?;
        self.enable(&capabilities).await?;
        self.shared.set_state(State::Running);

        let identity = self.identify(Cns::Controller.to_wire(), 0, 0).await;
        let identity = identity.map_err(|error| opening("Identify Controller", error))?;
        let identity = IdentifyController::decode(page(&identity))
            .map_err(|error| OpenError::Answer("Identify Controller", error))?;
        if identity.sqes & 0xf > 6 || identity.cqes & 0xf > 4 {
            return Err(OpenError::Unsupported("it needs queue entries larger than 64 and 16 bytes"));
        }
        let limits = self.nvm_limits(version).await?;
        let queues = self.request_queues().await?;
        let with_doorbell = (room / (2 * stride)).saturating_sub(1);
        let queues_max = u64::from(queues).min(with_doorbell).min(u64::from(u16::MAX - 1)) as u16;
        let shadow = self.set_up_shadow(&identity, page_log2).await?;
        let vectors = match self.shared.options.interrupts {
            Interrupts::Off => Vec::new(),
            Interrupts::Auto if self.core.spins() => Vec::new(),
            // One for the admin queue, which is polled, and one a queue.
            _ => device.interrupts(queues_max.min(QUEUES_WANTED as u16) + 1).map_err(at_device)?,
        };
        let facts = Facts {
            capabilities,
            version,
            identity,
            limits,
            doorbells,
            page_log2,
            queues_max,
            vectors,
            shadow,
        };
        self.shared.set_qids(queues_max);
        let _ = self.shared.facts.set(facts);
        self.start_events().await;
        self.health_due_ns.set(now_ns() + super::HEALTH_NS);
        Ok(())
    }

    fn make_admin_queue(
        &self,
        capabilities: &Capabilities,
        page_log2: u32,
        doorbells: &Doorbells,
    ) -> Result<(), OpenError> {
        let pool = self.core.pool();
        let page = 1usize << page_log2;
        let take = |bytes: usize| pool.take(bytes.max(page)).ok_or(OpenError::NoMemory);
        let sq = take(ADMIN_ENTRIES as usize * sqe::SIZE)?;
        let cq = take(ADMIN_ENTRIES as usize * cqe::SIZE)?;
        let name = self.shared.device().name();
        let mut translator = Translator::new(&self.shared, pool, page_log2);
        // Found out here that the arena is not one that the device can be shown.
        translator.address(&sq).map_err(|error| OpenError::Device(name.clone(), error))?;
        let ranges = take(memory::BUFFER_BYTES_MIN)?;
        let rings = Rings::new(
            DeviceBuffer::new(sq),
            DeviceBuffer::new(cq),
            ADMIN_ENTRIES,
            0,
            doorbells.clone(),
            capabilities.doorbell_stride_log2,
        );
        let queue = Queue::new(rings, translator, ADMIN_DEPTH, pool, ranges)
            .map_err(|error| OpenError::Device(name, error))?;
        *self.queue.borrow_mut() = Some(queue);
        Ok(())
    }

    /// Disables the controller, whatever it was doing, and enables it with our admin queue.
    pub(super) async fn enable(&self, capabilities: &Capabilities) -> Result<(), Failure> {
        self.disable(capabilities).await?;
        let addresses = match &mut *self.queue.borrow_mut() {
            Some(queue) => {
                queue.rings.reset();
                queue.ring_addresses().map_err(|_| Failure::ResetFailed)?
            }
            None => return Err(Failure::ResetFailed),
        };
        let registers = self.registers();
        registers.set_admin_queue(ADMIN_ENTRIES, addresses.0, addresses.1)?;
        let configuration = Configuration {
            enable: true,
            command_sets: if capabilities.io_command_sets { CommandSets::All } else { CommandSets::Nvm },
            page_log2: capabilities.page_min_log2.max(12),
            arbitration: Arbitration::RoundRobin,
            sqe_log2: sqe::SIZE.ilog2() as u8,
            cqe_log2: cqe::SIZE.ilog2() as u8,
            ..Configuration::RESET
        };
        registers.set_configuration(&configuration)?;
        self.await_ready(true, capabilities).await
    }

    /// CC.EN to 0, and CSTS.RDY after it.
    pub(super) async fn disable(&self, capabilities: &Capabilities) -> Result<(), Failure> {
        let registers = self.registers();
        let configuration = registers.configuration()?;
        if configuration.enable {
            let status = registers.status()?;
            if !status.ready && !status.fatal {
                // Base 2.0, section 3.1.3.5: EN is not to change before RDY has followed it. A controller
                // that never becomes ready is disabled all the same.
                let _ = self.await_ready(true, capabilities).await;
            }
            registers.set_configuration(&Configuration { enable: false, ..configuration })?;
        }
        self.await_ready(false, capabilities).await
    }

    async fn await_ready(&self, ready: bool, capabilities: &Capabilities) -> Result<(), Failure> {
        let timeout_ms = u32::from(capabilities.ready_timeout_500ms.max(1)) * 500;
        let deadline_ns = now_ns() + u64::from(timeout_ms) * 1_000_000;
        let mut pause_ns = 50_000;
        loop {
            let late = now_ns() > deadline_ns;
            let status = self.registers().status()?;
            if status.fatal && ready {
                return Err(Failure::Fatal);
            }
            if status.ready == ready {
                return Ok(());
            }
            if late {
                return Err(Failure::Unready { ready, timeout_ms });
            }
            // CSTS can only be asked; the specification has no event for it.
            self.core.sleep_ns(pause_ns).await;
            pause_ns = (pause_ns * 2).min(5_000_000);
        }
    }

    async fn identify(&self, cns: u8, nsid: u32, csi: u8) -> Result<Vec<u8>, AdminError> {
        let view = Identify { cns, cntid: 0, cns_specific: 0, csi, uuid_index: 0 };
        let sqe = Sqe { flags: 0, ..view.to_sqe(nsid) };
        Ok(self.execute_with(sqe, AdminData::In(identify::SIZE)).await?.data)
    }

    /// Limits of the NVM command set. Controllers before 2.0 need not know the question.
    async fn nvm_limits(&self, version: Version) -> Result<NvmController, OpenError> {
        if version < Version::new(2, 0, 0) {
            return Ok(NvmController::default());
        }
        match self.identify(Cns::CommandSetController.to_wire(), 0, Csi::Nvm.to_wire()).await {
            Ok(data) => Ok(NvmController::decode(page(&data))),
            Err(AdminError::Status(_)) => Ok(NvmController::default()),
            Err(error) => Err(opening("Identify Controller", error)),
        }
    }

    /// Number of Queues; returns how many pairs we may make.
    pub(super) async fn request_queues(&self) -> Result<u32, OpenError> {
        const WHAT: &str = "Set Features (Number of Queues)";
        let wanted = NumberOfQueues { submission: QUEUES_WANTED, completion: QUEUES_WANTED };
        let fid = FeatureId::NumberOfQueues.to_wire();
        let set = SetFeatures { fid, save: false, cdw11: wanted.to_wire(), uuid_index: 0 };
        let answer = self.execute_with(Sqe { flags: 0, ..set.to_sqe(0) }, AdminData::None).await;
        let answer = answer.map_err(|error| opening(WHAT, error))?;
        let given = NumberOfQueues::from_wire(answer.result as u32)
            .map_err(|error| OpenError::Answer(WHAT, error))?;
        Ok(given.submission.min(given.completion))
    }

    async fn set_up_shadow(
        &self,
        identity: &IdentifyController,
        page_log2: u32,
    ) -> Result<Option<Arc<crate::shadow::Pages>>, OpenError> {
        if identity.oacs & oacs::DOORBELL_BUFFER == 0 {
            return Ok(None);
        }
        // Without them every doorbell is rung, which is always right: a device that cannot be given the
        // pages does without.
        let Ok(pages) = ShadowPages::new(1 << page_log2) else { return Ok(None) };
        let Ok(address) = self.shared.map(pages.memory()) else { return Ok(None) };
        // The device knows them from here on, refused or not: other memory must not take their place.
        let pages = Arc::new(pages.into_pages());
        self.shared.keep_pages(&pages);
        let sqe = DoorbellBuffer { shadow: address, events: address + (1 << page_log2) }.to_sqe();
        match self.execute_raw(sqe).await {
            Ok(_) => {
                self.shadow_at.set(Some(address));
                Ok(Some(pages))
            }
            Err(AdminError::Status(_)) => Ok(None),
            Err(error) => Err(opening("Doorbell Buffer Config", error)),
        }
    }

    /// Identifies a namespace and keeps what it is; whether that is news.
    pub(super) async fn learn_namespace(&self, nsid: u32) -> Result<bool, AdminError> {
        let facts = self.shared.facts();
        let data = match self.identify(Cns::Namespace.to_wire(), nsid, 0).await {
            Ok(data) => data,
            Err(AdminError::Status(_)) => return Ok(self.shared.set_namespace(nsid, None)),
            Err(error) => return Err(error),
        };
        let decoded = IdentifyNamespace::decode(page(&data)).map_err(AdminError::Answer)?;
        if decoded.nsze == 0 {
            return Ok(self.shared.set_namespace(nsid, None));
        }
        let mut command_set = Csi::Nvm;
        if let Ok(list) = self.identify(Cns::NamespaceDescriptors.to_wire(), nsid, 0).await {
            let list = NamespaceDescriptor::decode_list(page(&list)).map_err(AdminError::Answer)?;
            for descriptor in list {
                if let NamespaceDescriptor::Csi(csi) = descriptor {
                    command_set = csi;
                }
            }
        }
        let page_min = facts.capabilities.page_min_log2;
        let info = NamespaceInfo::new(nsid, command_set, decoded, &facts.identity, &facts.limits, page_min);
        match info {
            Ok(info) => Ok(self.shared.set_namespace(nsid, Some(info))),
            Err(why) => {
                self.shared.set_refusal(nsid, why);
                Ok(self.shared.set_namespace(nsid, None))
            }
        }
    }
}

/// The page size that is used, if the controller is one that can be driven.
fn usable(capabilities: &Capabilities) -> Result<u32, OpenError> {
    if !capabilities.nvm_command_set && !capabilities.io_command_sets {
        return Err(OpenError::Unsupported("it has no NVM command set"));
    }
    if capabilities.page_min_log2 > capabilities.page_max_log2 {
        return Err(OpenError::Unsupported("its smallest page is larger than its largest"));
    }
    if capabilities.page_min_log2 > PAGE_LOG2_MAX {
        return Err(OpenError::Unsupported("it needs pages larger than 64 KiB"));
    }
    Ok(capabilities.page_min_log2.max(12).into())
}

pub(crate) fn opening(what: &'static str, error: AdminError) -> OpenError {
    match error {
        AdminError::Status(status) => OpenError::Command(what, status),
        AdminError::Failure(failure) => OpenError::Failure(failure),
        AdminError::Answer(error) => OpenError::Answer(what, error),
        AdminError::NoMemory | AdminError::Length(_) => OpenError::NoMemory,
        AdminError::Reset | AdminError::Busy => OpenError::Timeout(what),
    }
}

pub(super) fn page(data: &[u8]) -> &[u8; identify::SIZE] {
    data.first_chunk().expect("Identify data was asked for with a whole page")
}
