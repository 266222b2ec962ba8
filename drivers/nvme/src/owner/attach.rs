//! Attaching a controller: enables and identifies it, sets up queues, shadow doorbells, interrupts and
//! events.

use std::rc::Rc;
use std::sync::Arc;

use dma::DeviceBuffer;
use reactor::{Core, Period};
use wire_nvme::admin::{Identify, SetFeatures};
use wire_nvme::doorbell::{DOORBELLS_OFFSET, DoorbellBuffer};
use wire_nvme::feature::{FeatureId, HOST_BEHAVIOR_SIZE, HostBehavior, NumberOfQueues};
use wire_nvme::identify::{
    self, Cns, Csi, IdentifyController, IdentifyNamespace, NamespaceDescriptor, NvmController, NvmNamespace,
    ctratt, oacs,
};
use wire_nvme::registers::{
    Arbitration, CommandSets, ControllerCapabilities, ControllerConfiguration, NvmeVersion,
};
use wire_nvme::{Sqe, cqe, sqe};

use super::{ADMIN_DEPTH, ADMIN_ENTRIES, ControllerOwner, OWNER_REQUESTS_MAX, OwnerPoller};
use crate::descriptors::DescriptorBuilder;
use crate::device::{DeviceError, DoorbellRegion, NvmeDevice};
use crate::error::{AdminError, ControllerFailure, NvmeOpenError};
use crate::namespace_info::NamespaceInfo;
use crate::options::{InterruptMode, Options};
use crate::queue::MemoryQueue;
use crate::rings::Rings;
use crate::shadow::ShadowDoorbellMemory;
use crate::shared::{AdminData, ControllerParams, RunState, SharedController};

/// I/O queue pairs requested: one per core on all but the largest machines.
const QUEUES_WANTED: u32 = 64;
/// Largest supported CAP.MPSMIN, as log2 of bytes: buffers are aligned to 64 KiB at most.
const PAGE_LOG2_MAX: u8 = 16;

/// Attaches a controller on the core that becomes its owner.
pub(crate) async fn attach(
    core: &Core,
    device: Box<dyn NvmeDevice>,
    options: &Options,
) -> Result<Arc<SharedController>, NvmeOpenError> {
    let (sender, requests) = core.mailbox(OWNER_REQUESTS_MAX);
    let shared = SharedController::new(device, options.clone(), sender);
    let name = shared.device().name();
    let owner = ControllerOwner::new(core, &shared, requests);
    core.add_poller(Box::new(OwnerPoller { owner: owner.clone(), name: name.clone() }), Period::EveryTurn);
    match owner.bring_up(&name).await {
        Ok(()) => Ok(shared),
        Err(error) => {
            shared.set_failure(shared.failure().unwrap_or(ControllerFailure::Detached));
            owner.force_stop();
            owner.finished.set(true);
            Err(error)
        }
    }
}

impl ControllerOwner {
    async fn bring_up(self: &Rc<Self>, name: &str) -> Result<(), NvmeOpenError> {
        let device = self.shared.device();
        let device_error = |error| NvmeOpenError::Device(name.to_string(), error);
        device.enable_dma().map_err(device_error)?;
        let capabilities = self.registers().capabilities()?;
        let version = self.registers().version()?;
        let page_log2 = select_page_log2(&capabilities)?;
        // At least the doorbells of the admin queue and one I/O queue.
        let stride = 4u64 << capabilities.doorbell_stride_log2;
        let need = 4 * stride;
        let doorbells = device.doorbells(need).map_err(device_error)?;
        let room = doorbells.region.len().saturating_sub(doorbells.offset).min(doorbells.bytes);
        if room < need {
            let base = u64::from(DOORBELLS_OFFSET);
            return Err(device_error(DeviceError::BarTooSmall { have: base + room, need: base + need }));
        }
        let doorbells = DoorbellRegion { bytes: room, ..doorbells };
        self.make_admin_queue(&capabilities, page_log2, &doorbells)?;
        self.enable(&capabilities).await?;
        self.shared.set_state(RunState::Running);

        let identity = self.identify(Cns::Controller.to_wire(), 0, 0).await;
        let identity = identity.map_err(|error| error.while_opening("Identify Controller"))?;
        let identity = IdentifyController::decode(identify_page(&identity))
            .map_err(|error| NvmeOpenError::InvalidResponse("Identify Controller", error))?;
        if identity.sqes & 0xf > 6 || identity.cqes & 0xf > 4 {
            return Err(NvmeOpenError::Unsupported("it needs queue entries larger than 64 and 16 bytes"));
        }
        let limits = self.nvm_limits(version).await?;
        self.enable_extended_formats(&identity).await?;
        let queues = self.request_queues().await?;
        let with_doorbell = (room / (2 * stride)).saturating_sub(1);
        let queues_max = u64::from(queues).min(with_doorbell).min(u64::from(u16::MAX - 1)) as u16;
        let shadow = self.configure_shadow_doorbells(&identity, page_log2).await?;
        let vectors = match self.shared.options.interrupts {
            InterruptMode::Off => Vec::new(),
            InterruptMode::Auto if self.core.spins() => Vec::new(),
            // Vector 0 for the admin queue, which is polled, and one per I/O queue.
            _ => device.interrupts(queues_max.min(QUEUES_WANTED as u16) + 1).map_err(device_error)?,
        };
        let params = ControllerParams {
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
        self.shared.set_free_qids(queues_max);
        let _ = self.shared.params.set(params);
        self.start_events().await;
        self.health_due_ns.set(Some(self.core.now_ns() + super::HEALTH_CHECK_NS));
        Ok(())
    }

    fn make_admin_queue(
        &self,
        capabilities: &ControllerCapabilities,
        page_log2: u32,
        doorbells: &DoorbellRegion,
    ) -> Result<(), NvmeOpenError> {
        let pool = self.core.pool();
        let page = 1usize << page_log2;
        let take = |bytes: usize| pool.take(bytes.max(page)).ok_or(NvmeOpenError::NoMemory);
        let sq = take(ADMIN_ENTRIES as usize * sqe::SIZE)?;
        let cq = take(ADMIN_ENTRIES as usize * cqe::SIZE)?;
        let name = self.shared.device().name();
        let mut descriptors = DescriptorBuilder::new(&self.shared, pool, page_log2);
        // Fails here if the arena cannot be mapped for the device.
        descriptors.address(&sq).map_err(|error| NvmeOpenError::Device(name.clone(), error))?;
        let ranges = take(dma::BUFFER_BYTES_MIN)?;
        let rings = Rings::new(
            DeviceBuffer::new(sq),
            DeviceBuffer::new(cq),
            ADMIN_ENTRIES,
            0,
            doorbells.clone(),
            capabilities.doorbell_stride_log2,
        );
        let queue = MemoryQueue::new(rings, descriptors, ADMIN_DEPTH, pool, ranges)
            .map_err(|error| NvmeOpenError::Device(name, error))?;
        *self.queue.borrow_mut() = Some(queue);
        Ok(())
    }

    /// Disables the controller in whatever state it is, then enables it with the driver's admin queue.
    pub(super) async fn enable(
        &self,
        capabilities: &ControllerCapabilities,
    ) -> Result<(), ControllerFailure> {
        self.disable(capabilities).await?;
        let addresses = match &mut *self.queue.borrow_mut() {
            Some(queue) => {
                queue.rings.reset();
                queue.ring_addresses().map_err(|_| ControllerFailure::ResetFailed)?
            }
            None => return Err(ControllerFailure::ResetFailed),
        };
        let registers = self.registers();
        registers.set_admin_queue(ADMIN_ENTRIES, addresses.0, addresses.1)?;
        let configuration = ControllerConfiguration {
            enable: true,
            command_sets: if capabilities.io_command_sets { CommandSets::All } else { CommandSets::Nvm },
            page_log2: capabilities.page_min_log2.max(12),
            arbitration: Arbitration::RoundRobin,
            sqe_log2: sqe::SIZE.ilog2() as u8,
            cqe_log2: cqe::SIZE.ilog2() as u8,
            ..ControllerConfiguration::RESET
        };
        registers.set_configuration(&configuration)?;
        self.await_ready(true, capabilities).await
    }

    /// Clears CC.EN and waits until CSTS.RDY is 0.
    pub(super) async fn disable(
        &self,
        capabilities: &ControllerCapabilities,
    ) -> Result<(), ControllerFailure> {
        let registers = self.registers();
        let configuration = registers.configuration()?;
        if configuration.enable {
            let status = registers.status()?;
            if !status.ready && !status.fatal {
                // Base 2.0, section 3.1.3.5: EN must not change before RDY has followed it. A controller
                // that never becomes ready is disabled all the same.
                let _ = self.await_ready(true, capabilities).await;
            }
            registers.set_configuration(&ControllerConfiguration { enable: false, ..configuration })?;
        }
        self.await_ready(false, capabilities).await
    }

    async fn await_ready(
        &self,
        ready: bool,
        capabilities: &ControllerCapabilities,
    ) -> Result<(), ControllerFailure> {
        let timeout_ms = u32::from(capabilities.ready_timeout_500ms.max(1)) * 500;
        let deadline_ns = self.core.now_ns() + u64::from(timeout_ms) * 1_000_000;
        let mut pause_ns = 50_000;
        loop {
            let late = self.core.now_ns() > deadline_ns;
            let status = self.registers().status()?;
            if status.fatal && ready {
                return Err(ControllerFailure::Fatal);
            }
            if status.ready == ready {
                return Ok(());
            }
            if late {
                return Err(ControllerFailure::ReadyTimeout { ready, timeout_ms });
            }
            // CSTS must be polled; the specification defines no event for it.
            self.core.sleep_ns(pause_ns).await;
            pause_ns = (pause_ns * 2).min(5_000_000);
        }
    }

    async fn identify(&self, cns: u8, nsid: u32, csi: u8) -> Result<Vec<u8>, AdminError> {
        let view = Identify { cns, cntid: 0, cns_specific: 0, csi, uuid_index: 0 };
        let sqe = Sqe { flags: 0, ..view.to_sqe(nsid) };
        Ok(self.execute_with(sqe, AdminData::In(identify::SIZE)).await?.data)
    }

    /// Limits of the NVM command set (CNS 06h), which controllers before version 2.0 need not support.
    async fn nvm_limits(&self, version: NvmeVersion) -> Result<NvmController, NvmeOpenError> {
        if version < NvmeVersion::new(2, 0, 0) {
            return Ok(NvmController::default());
        }
        match self.identify(Cns::CommandSetController.to_wire(), 0, Csi::Nvm.to_wire()).await {
            Ok(data) => Ok(NvmController::decode(identify_page(&data))),
            Err(AdminError::Status(_)) => Ok(NvmController::default()),
            Err(error) => Err(error.while_opening("Identify Controller")),
        }
    }

    /// Tells a controller that has extended LBA formats that the host knows them.
    pub(super) async fn enable_extended_formats(
        &self,
        identity: &IdentifyController,
    ) -> Result<(), NvmeOpenError> {
        if identity.ctratt & ctratt::EXTENDED_FORMATS == 0 {
            return Ok(());
        }
        let mut data = [0; HOST_BEHAVIOR_SIZE];
        HostBehavior { extended_formats: true, ..HostBehavior::default() }.encode(&mut data);
        let fid = FeatureId::HostBehavior.to_wire();
        let set = SetFeatures { fid, save: false, cdw11: 0, uuid_index: 0 };
        let sqe = Sqe { flags: 0, ..set.to_sqe(0) };
        match self.execute_with(sqe, AdminData::Out(data.to_vec())).await {
            // Namespaces with other formats can be used all the same.
            Ok(_) | Err(AdminError::Status(_)) => Ok(()),
            Err(error) => Err(error.while_opening("Set Features (Host Behavior Support)")),
        }
    }

    /// The extended formats of a namespace (CNS 05h), of a controller that has them.
    async fn nvm_namespace(&self, nsid: u32) -> Result<Option<NvmNamespace>, AdminError> {
        if self.shared.params().identity.ctratt & ctratt::EXTENDED_FORMATS == 0 {
            return Ok(None);
        }
        let data = self.identify(Cns::CommandSetNamespace.to_wire(), nsid, Csi::Nvm.to_wire()).await?;
        Ok(Some(NvmNamespace::decode(identify_page(&data))))
    }

    /// Sets the Number of Queues feature; returns the number of I/O queue pairs granted.
    pub(super) async fn request_queues(&self) -> Result<u32, NvmeOpenError> {
        const WHAT: &str = "Set Features (Number of Queues)";
        let wanted = NumberOfQueues { submission: QUEUES_WANTED, completion: QUEUES_WANTED };
        let fid = FeatureId::NumberOfQueues.to_wire();
        let set = SetFeatures { fid, save: false, cdw11: wanted.to_wire(), uuid_index: 0 };
        let response = self.execute_with(Sqe { flags: 0, ..set.to_sqe(0) }, AdminData::None).await;
        let response = response.map_err(|error| error.while_opening(WHAT))?;
        let granted = NumberOfQueues::from_wire(response.result as u32)
            .map_err(|error| NvmeOpenError::InvalidResponse(WHAT, error))?;
        Ok(granted.submission.min(granted.completion))
    }

    async fn configure_shadow_doorbells(
        &self,
        identity: &IdentifyController,
        page_log2: u32,
    ) -> Result<Option<Arc<crate::shadow::ShadowDoorbellPages>>, NvmeOpenError> {
        if identity.oacs & oacs::DOORBELL_BUFFER == 0 {
            return Ok(None);
        }
        // Shadow doorbells are an optimization: without the pages or their mapping, every doorbell is
        // written.
        let Ok(pages) = ShadowDoorbellMemory::new(1 << page_log2) else { return Ok(None) };
        let Ok(address) = self.shared.mappings().map(pages.memory()) else { return Ok(None) };
        // They stay mapped from here on, even if the command fails: retain them with the device.
        let pages = Arc::new(pages.into_doorbells());
        self.shared.mappings().retain(Box::new(pages.clone()));
        let sqe = DoorbellBuffer { shadow: address, events: address + (1 << page_log2) }.to_sqe();
        match self.execute_raw(sqe).await {
            Ok(_) => {
                self.shadow_address.set(Some(address));
                Ok(Some(pages))
            }
            Err(AdminError::Status(_)) => Ok(None),
            Err(error) => Err(error.while_opening("Doorbell Buffer Config")),
        }
    }

    /// Identifies a namespace and stores the result; returns whether it changed.
    pub(super) async fn refresh_namespace(&self, nsid: u32) -> Result<bool, AdminError> {
        let params = self.shared.params();
        let data = match self.identify(Cns::Namespace.to_wire(), nsid, 0).await {
            Ok(data) => data,
            Err(AdminError::Status(_)) => return Ok(self.shared.set_namespace(nsid, None)),
            Err(error) => return Err(error),
        };
        let decoded = IdentifyNamespace::decode(identify_page(&data)).map_err(AdminError::InvalidResponse)?;
        if decoded.nsze == 0 {
            return Ok(self.shared.set_namespace(nsid, None));
        }
        let (mut command_set, mut uuid) = (Csi::Nvm, None);
        if let Ok(list) = self.identify(Cns::NamespaceDescriptors.to_wire(), nsid, 0).await {
            let list = NamespaceDescriptor::decode_list(identify_page(&list))
                .map_err(AdminError::InvalidResponse)?;
            for descriptor in list {
                match descriptor {
                    NamespaceDescriptor::Csi(csi) => command_set = csi,
                    NamespaceDescriptor::Uuid(found) => uuid = Some(found).filter(|found| *found != [0; 16]),
                    NamespaceDescriptor::Nguid(_) | NamespaceDescriptor::Eui64(_) => {}
                }
            }
        }
        let nvm = match decoded.dps & 7 != 0 && command_set == Csi::Nvm {
            true => self.nvm_namespace(nsid).await?,
            false => None,
        };
        let page_min = params.capabilities.page_min_log2;
        let both = (decoded, nvm.as_ref());
        let info = NamespaceInfo::new(nsid, command_set, both, &params.identity, &params.limits, page_min);
        match info {
            Ok(info) => Ok(self.shared.set_namespace(nsid, Some(NamespaceInfo { uuid, ..info }))),
            Err(why) => {
                self.shared.set_unsupported_reason(nsid, why);
                Ok(self.shared.set_namespace(nsid, None))
            }
        }
    }
}

/// Memory page size (CC.MPS) as log2 of bytes, if the driver supports the controller.
fn select_page_log2(capabilities: &ControllerCapabilities) -> Result<u32, NvmeOpenError> {
    if !capabilities.nvm_command_set && !capabilities.io_command_sets {
        return Err(NvmeOpenError::Unsupported("it has no NVM command set"));
    }
    if capabilities.page_min_log2 > capabilities.page_max_log2 {
        return Err(NvmeOpenError::Unsupported("its smallest page is larger than its largest"));
    }
    if capabilities.page_min_log2 > PAGE_LOG2_MAX {
        return Err(NvmeOpenError::Unsupported("it needs pages larger than 64 KiB"));
    }
    Ok(capabilities.page_min_log2.max(12).into())
}

/// The whole page that an Identify command of the driver, or a log page of that length, always returns.
pub(crate) fn identify_page(data: &[u8]) -> &[u8; identify::SIZE] {
    data.first_chunk().expect("Identify data is a whole page")
}
