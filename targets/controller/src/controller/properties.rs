//! Properties: CAP, VS, CC and CSTS, and what enabling and shutting down mean.

use ring::Status;
use wire_nvme::Sqe;
use wire_nvme::fabrics::{PropertyGet, PropertySet};
use wire_nvme::registers::{
    Arbitration, Capabilities, CommandSets, Configuration, ControllerStatus, ShutdownNotification,
    ShutdownStatus, Version, offset,
};

use super::{Answer, Reply};
use crate::limits::PAGE_LOG2;
use crate::{Association, INVALID_FIELD, Kind, Limits};

/// The version of the base specification that controllers follow.
pub(super) const VERSION: Version = Version::new(2, 0, 0);

/// How long enabling and disabling may take (CAP.TO): closing I/O queues waits for their devices.
const READY_TIMEOUT_500MS: u8 = 30;

#[derive(Debug)]
pub(super) struct Properties {
    capabilities: Capabilities,
    configuration: Configuration,
    status: ControllerStatus,
    kind: Kind,
}

/// What a change of CC asks of the rest of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    None,
    Enabled,
    Reset,
    Shutdown,
}

impl Properties {
    pub(super) fn new(limits: &Limits, kind: Kind) -> Properties {
        Properties {
            capabilities: Capabilities {
                queue_entries_max: limits.io_queue_entries_max,
                contiguous_queues_required: true,
                arbitration: 0,
                ready_timeout_500ms: READY_TIMEOUT_500MS,
                doorbell_stride_log2: 0,
                subsystem_reset: false,
                nvm_command_set: true,
                io_command_sets: false,
                no_io_command_set: false,
                boot_partitions: false,
                page_min_log2: PAGE_LOG2,
                page_max_log2: PAGE_LOG2,
                persistent_memory: false,
                memory_buffer: false,
                subsystem_shutdown: false,
                // Controller Ready With Media: all that CSTS.RDY can mean here.
                ready_modes: 1,
            },
            configuration: Configuration::RESET,
            status: ControllerStatus::RESET,
            kind,
        }
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.configuration.enable && self.status.ready
    }

    /// Controller fatal status.
    pub(super) fn fail(&mut self) {
        self.status.fatal = true;
        self.status.ready = false;
    }

    /// Finishes a reset or a shutdown once the I/O queues are gone. The host polls CSTS, so looking
    /// whenever it asks is soon enough.
    pub(super) fn settle(&mut self, association: &Association) {
        let resetting = !self.configuration.enable && self.status.ready;
        let shutting_down = self.status.shutdown == ShutdownStatus::Occurring;
        if (resetting || shutting_down) && association.queues().is_empty() {
            if resetting {
                self.status = ControllerStatus::RESET;
            } else {
                self.status.shutdown = ShutdownStatus::Complete;
            }
        }
    }

    /// Property Get (Base 2.0, section 6.5).
    pub(super) fn get(&self, sqe: &Sqe) -> Answer {
        let PropertyGet { wide, offset } = PropertyGet::of(sqe).map_err(|_| INVALID_FIELD)?;
        let value = match (offset, wide) {
            (offset::CAP, true) => self.capabilities.encode(),
            (offset::VS | offset::CC | offset::CSTS | offset::CRTO, false) => self.register(offset).into(),
            _ => return Err(INVALID_FIELD),
        };
        Reply::result(value)
    }

    /// The four bytes at a multiple of four; 0 where there is nothing.
    pub(super) fn register(&self, offset: u32) -> u32 {
        const CAP_HIGH: u32 = offset::CAP + 4;
        match offset {
            offset::CAP => self.capabilities.encode() as u32,
            CAP_HIGH => (self.capabilities.encode() >> 32) as u32,
            offset::VS => VERSION.encode(),
            offset::CC => self.configuration.encode(),
            offset::CSTS => self.status.encode(),
            // CRTO.CRWMT, in the units of CAP.TO.
            offset::CRTO => READY_TIMEOUT_500MS.into(),
            _ => 0,
        }
    }

    /// Property Set (Base 2.0, section 6.6); CC is all that can be set.
    pub(super) fn set(&mut self, sqe: &Sqe, association: &Association) -> Result<Change, Status> {
        let property = PropertySet::of(sqe).map_err(|_| INVALID_FIELD)?;
        if property.offset != offset::CC || property.wide {
            return Err(INVALID_FIELD);
        }
        self.configure(property.value as u32, association)
    }

    /// Writes CC.
    pub(super) fn configure(&mut self, value: u32, association: &Association) -> Result<Change, Status> {
        let wanted = Configuration::decode(value).map_err(|_| INVALID_FIELD)?;
        let was = std::mem::replace(&mut self.configuration, wanted);
        let change = match (was.enable, wanted.enable) {
            (false, true) if self.status.ready => {
                // The reset before has not finished (Base 2.0, section 3.1.3.5: CC.EN).
                self.configuration = was;
                return Err(Status::COMMAND_SEQUENCE_ERROR);
            }
            (false, true) if !self.can_run(&wanted) => {
                self.status.fatal = true;
                Change::None
            }
            (false, true) => {
                self.status = ControllerStatus { ready: true, ..ControllerStatus::RESET };
                Change::Enabled
            }
            (true, false) => {
                association.set_enabled(false);
                // Ready until the I/O queues are gone; a controller that failed never was.
                self.status.ready = true;
                Change::Reset
            }
            _ => Change::None,
        };
        let shuts_down =
            wanted.shutdown != ShutdownNotification::None && was.shutdown == ShutdownNotification::None;
        let change = if shuts_down && change != Change::Reset {
            association.set_enabled(false);
            self.status.shutdown = ShutdownStatus::Occurring;
            Change::Shutdown
        } else {
            change
        };
        self.settle(association);
        Ok(change)
    }

    /// Whether a controller can be enabled so: else it reports a fatal status. Entry sizes may stay 0
    /// on a controller that has no I/O queues.
    fn can_run(&self, wanted: &Configuration) -> bool {
        let sizes = (wanted.sqe_log2, wanted.cqe_log2);
        let sizes_fit = match self.kind {
            Kind::Nvm => sizes == (6, 4),
            Kind::Discovery => sizes == (6, 4) || sizes == (0, 0),
        };
        sizes_fit
            && wanted.command_sets == CommandSets::Nvm
            && wanted.page_log2 == PAGE_LOG2
            && wanted.arbitration == Arbitration::RoundRobin
            && !wanted.ready_independent_of_media
    }
}
