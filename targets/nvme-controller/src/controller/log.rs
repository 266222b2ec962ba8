//! Get Log Page (Base 2.0, section 5.16).

use std::collections::VecDeque;

use block_io::Status;
use wire_nvme::admin::GetLogPage;
use wire_nvme::log::{
    AnaGroup, AnaLog, CommandEffects, CommandEffectsLog, ErrorEntry, FeatureEffects, FeatureEffectsLog,
    FirmwareSlots, HealthLog, LogId, SupportedLogPage, SupportedLogPages, discovery_option,
};
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};
use wire_nvme::{NSID_ALL, Sqe, identify};

use super::identify::{EFFECT_FREE_COMMANDS, QUEUE_COMMANDS};
use super::{AdminResult, Controller, features};
use crate::{ControllerLimits, FIRMWARE, INVALID_FIELD, Subsystem, SubsystemKind, io};

/// The reported composite temperature in kelvins, a constant 20 °C: there is no sensor.
pub(super) const TEMPERATURE_KELVINS: u16 = 293;
/// Critical Warning, bit 1: the temperature is at or beyond a threshold.
const TEMPERATURE_WARNING: u8 = 1 << 1;
/// Warning Composite Temperature Threshold (WCTEMP) and default over-temperature threshold, in kelvins: 70
/// °C.
pub(super) const COMPOSITE_KELVINS_MAX: u16 = 343;

/// The Error Information log: the most recent failed admin commands.
#[derive(Debug)]
pub(super) struct ErrorLog {
    // Newest first.
    entries: VecDeque<ErrorEntry>,
    entries_max: usize,
    count: u64,
}

impl ErrorLog {
    pub(super) fn new(entries_max: u16) -> ErrorLog {
        ErrorLog { entries: VecDeque::new(), entries_max: entries_max.into(), count: 0 }
    }

    pub(super) fn push(&mut self, sqe: &Sqe, status: Status, transport: u8) {
        self.count += 1;
        self.entries.truncate(self.entries_max - 1);
        self.entries.push_front(ErrorEntry {
            count: self.count,
            sqid: 0,
            cid: sqe.cid,
            status,
            // FFFFh: not specific to a parameter.
            location: 0xffff,
            lba: 0,
            nsid: sqe.nsid,
            transport,
            command_specific: 0,
            transport_specific: 0,
        });
        assert!(self.entries.len() <= self.entries_max, "the error log has {} entries", self.entries.len());
    }

    fn page(&self) -> Vec<u8> {
        let mut page = vec![0; self.entries_max * ErrorEntry::SIZE];
        for (entry, into) in self.entries.iter().zip(page.as_chunks_mut().0) {
            entry.encode(into);
        }
        page
    }
}

/// The log pages that a controller supports (Base 2.0, section 3.1.2: log page support).
fn supported_log_pages(subsystem: &Subsystem, limits: &ControllerLimits) -> Vec<LogId> {
    match subsystem.kind {
        SubsystemKind::Discovery => vec![LogId::SupportedLogPages, LogId::FeatureEffects, LogId::Discovery],
        SubsystemKind::Nvm => {
            let mut pages = vec![
                LogId::SupportedLogPages,
                LogId::ErrorInformation,
                LogId::Health,
                LogId::FirmwareSlot,
                LogId::ChangedNamespaces,
                LogId::CommandEffects,
                LogId::PersistentEvents,
                LogId::FeatureEffects,
            ];
            let reservations = limits.has_optional(identify::oncs::RESERVATIONS);
            pages.extend(reservations.then_some(LogId::ReservationNotification));
            pages.extend(subsystem.ana_reporting.then_some(LogId::Ana));
            pages
        }
    }
}

impl Controller {
    pub(super) fn get_log_page(&mut self, sqe: &Sqe) -> AdminResult {
        let command = GetLogPage::from_sqe(sqe);
        let pages = supported_log_pages(&self.view, &self.limits);
        let page = LogId::from_wire(command.lid).filter(|page| pages.contains(page));
        let page = page.ok_or(Status::INVALID_LOG_PAGE.do_not_retry())?;
        // The offset is in bytes and dword aligned. No page supports index offsets.
        if command.offset_is_index || !command.offset.is_multiple_of(4) {
            return Err(INVALID_FIELD);
        }
        if command.length_bytes > self.limits.transfer_max_bytes.into() {
            return Err(INVALID_FIELD);
        }
        // Reading a page changes state (events, notifications), so the host's buffer is checked first.
        self.check_buffer_length(sqe, command.length_bytes)?;
        let content = match page {
            LogId::SupportedLogPages => supported_pages_log(&pages),
            LogId::ErrorInformation => self.errors.page(),
            LogId::Health => self.health_page(sqe.nsid)?,
            LogId::FirmwareSlot => firmware_slots(),
            LogId::ChangedNamespaces => {
                let mut page = vec![0; identify::SIZE];
                identify::NamespaceList(self.events.changed_namespaces()).encode(sized(&mut page));
                page
            }
            LogId::CommandEffects => {
                if command.csi != identify::Csi::Nvm.to_wire() {
                    return Err(INVALID_FIELD);
                }
                command_effects(&self.limits, &self.view)
            }
            LogId::FeatureEffects => feature_effects(&self.view, &self.limits),
            // It is of the subsystem, and of no namespace (Base 2.0, section 5.16).
            LogId::PersistentEvents if sqe.nsid != 0 && sqe.nsid != NSID_ALL => return Err(INVALID_FIELD),
            LogId::PersistentEvents => self.persistent_events_page(&command)?,
            LogId::Ana => self.ana_page(command.specific & AnaLog::GROUPS_ONLY != 0),
            LogId::ReservationNotification => self.notifications.page(),
            LogId::Discovery => {
                let entries_max = self.limits.admin_queue_entries_max as u16;
                let extended = command.specific & discovery_option::EXTENDED != 0;
                self.discovery.page(self.hostnqn(), &self.port.address, entries_max, extended)
            }
            _ => return Err(Status::INVALID_LOG_PAGE.do_not_retry()),
        };
        // An offset beyond the end is rejected. Bytes after the end read as zeroes.
        let offset = usize::try_from(command.offset).ok().filter(|&offset| offset <= content.len());
        let offset = offset.ok_or(INVALID_FIELD)?;
        let length = command.length_bytes as usize;
        let mut data = content;
        data.drain(..offset);
        data.resize(length, 0);
        if !command.retain_event {
            self.events.log_read(command.lid);
            if page == LogId::ReservationNotification {
                self.notifications.pop_oldest();
                if self.notifications.has_unread() {
                    self.events.reservation_logged();
                }
            }
        }
        self.respond_with_data(sqe, data)
    }

    pub(super) fn health_page(&self, nsid: u32) -> Result<Vec<u8>, Status> {
        // LPA bit 0 is clear: no log per namespace (Base 2.0, section 5.16.1.3).
        if nsid != 0 && nsid != NSID_ALL {
            return Err(INVALID_FIELD);
        }
        let health = &self.health;
        // Data units are 1000 times 512 bytes, rounded up.
        let units = |bytes: u128| bytes.div_ceil(512 * 1000);
        let mut page = vec![0; HealthLog::SIZE];
        HealthLog {
            critical_warning: if self.features.exceeds_threshold(TEMPERATURE_KELVINS) {
                TEMPERATURE_WARNING
            } else {
                0
            },
            temperature_kelvins: TEMPERATURE_KELVINS,
            spare_percent: 100,
            spare_threshold_percent: 10,
            data_units_read: units(health.bytes_read),
            data_units_written: units(health.bytes_written),
            host_reads: health.reads,
            host_writes: health.writes,
            busy_minutes: health.busy_minutes.into(),
            power_cycles: 1,
            power_on_hours: health.power_on_hours.into(),
            media_errors: health.media_errors.into(),
            error_log_entries: self.errors.count.into(),
            ..HealthLog::default()
        }
        .encode(sized(&mut page));
        Ok(page)
    }

    fn ana_page(&self, groups_only: bool) -> Vec<u8> {
        let change_count = self.events.ana_changes();
        let group = |id: u32| {
            let members = self.view.namespaces.iter().filter(|namespace| namespace.anagrpid == id);
            AnaGroup {
                id,
                change_count,
                state: self.view.ana_state(self.port.portid, id),
                nsids: if groups_only {
                    Vec::new()
                } else {
                    members.map(|namespace| namespace.nsid).collect()
                },
            }
        };
        let log = AnaLog { change_count, groups: self.view.ana_groups().into_iter().map(group).collect() };
        let mut page = vec![0; log.encoded_length()];
        log.encode(&mut page);
        page
    }
}

fn sized<const N: usize>(page: &mut [u8]) -> &mut [u8; N] {
    page.try_into().expect("the page was made with its size")
}

fn firmware_slots() -> Vec<u8> {
    let mut slots = FirmwareSlots { active: 1, ..FirmwareSlots::default() };
    slots.revisions[0] = identify::ascii(FIRMWARE);
    let mut page = vec![0; FirmwareSlots::SIZE];
    slots.encode(sized(&mut page));
    page
}

fn supported_pages_log(pages: &[LogId]) -> Vec<u8> {
    let mut log = SupportedLogPages([SupportedLogPage::default(); 256]);
    for page in pages {
        log.0[usize::from(page.to_wire())].supported = true;
    }
    let discovery = &mut log.0[usize::from(LogId::Discovery.to_wire())];
    if discovery.supported {
        discovery.specific = discovery_option::EXTENDED.into();
    }
    let mut page = vec![0; SupportedLogPages::SIZE];
    log.encode(sized(&mut page));
    page
}

fn command_effects(limits: &ControllerLimits, subsystem: &Subsystem) -> Vec<u8> {
    let mut log = CommandEffectsLog::default();
    if limits.memory_based {
        let doorbell_buffer = limits.shadow_doorbells.then_some(AdminOpcode::DoorbellBufferConfig);
        for opcode in QUEUE_COMMANDS.into_iter().chain(doorbell_buffer) {
            log.admin[usize::from(opcode.to_wire())] = CommandEffects::PLAIN;
        }
    }
    let keep_alive = (!limits.memory_based).then_some(AdminOpcode::KeepAlive);
    for opcode in EFFECT_FREE_COMMANDS.into_iter().chain(keep_alive) {
        log.admin[usize::from(opcode.to_wire())] = CommandEffects::PLAIN;
    }
    // Set Features does not report CCC (Controller Capability Change): Number of Queues does change what the
    // controller offers, but no host needs to identify it again, and for CCC Linux freezes all queues.
    log.admin[usize::from(AdminOpcode::SetFeatures.to_wire())] = CommandEffects::PLAIN;
    for opcode in [
        NvmOpcode::ReservationRegister,
        NvmOpcode::ReservationReport,
        NvmOpcode::ReservationAcquire,
        NvmOpcode::ReservationRelease,
    ] {
        log.io[usize::from(opcode.to_wire())] = CommandEffects::PLAIN;
    }
    for opcode in [NvmOpcode::Flush, NvmOpcode::Read, NvmOpcode::Compare, NvmOpcode::Verify] {
        log.io[usize::from(opcode.to_wire())] = CommandEffects::PLAIN;
    }
    let uncorrectable = subsystem.namespaces.iter().any(|namespace| namespace.can_write_uncorrectable);
    for opcode in [NvmOpcode::Write, NvmOpcode::WriteZeroes, NvmOpcode::DatasetManagement, NvmOpcode::Copy]
        .into_iter()
        .chain(uncorrectable.then_some(NvmOpcode::WriteUncorrectable))
    {
        log.io[usize::from(opcode.to_wire())] = CommandEffects::CHANGES_BLOCKS;
    }
    for opcode in NvmOpcode::ALL.iter().filter(|opcode| !limits.has_optional(io::optional_command(**opcode)))
    {
        log.io[usize::from(opcode.to_wire())] = CommandEffects::default();
    }
    let mut page = vec![0; CommandEffectsLog::SIZE];
    log.encode(sized(&mut page));
    page
}

fn feature_effects(subsystem: &Subsystem, limits: &ControllerLimits) -> Vec<u8> {
    let mut log = FeatureEffectsLog([FeatureEffects::default(); 256]);
    for feature in features::supported_features(subsystem, limits) {
        log.0[usize::from(feature.to_wire())] = FeatureEffects {
            supported: true,
            scope: FeatureEffects::CONTROLLER,
            ..FeatureEffects::default()
        };
    }
    let mut page = vec![0; FeatureEffectsLog::SIZE];
    log.encode(sized(&mut page));
    page
}
