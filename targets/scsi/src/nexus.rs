//! I_T_L nexuses: unit attentions and access of an initiator port through a target port.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use arrayvec::ArrayVec;
use reservations::{DenyMask, Registrant, RegistrantError};
use wire_scsi::AdditionalSense;
use wire_scsi::copy::CopyStatus;
use wire_scsi::inquiry::ProtocolId;
use wire_scsi::port_groups::AccessState;

use crate::limits::{ATTENTIONS_MAX, NEXUSES_MAX};
use crate::ports::GroupAccess;
use crate::unit::LogicalUnit;

/// The two ports of a nexus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NexusPorts {
    /// Name of the initiator port; with iSCSI `NAME,i,0xISID`.
    pub initiator: String,
    /// Name of the target port; with iSCSI `NAME,t,0xTAG`.
    pub target: String,
    /// Name of the target device; with iSCSI the target's name. Empty for none.
    pub target_device: String,
    /// Relative identifier of the target port, from 1.
    pub relative_port: u16,
    /// Target port group that the port belongs to.
    pub port_group: u16,
    /// The transport.
    pub protocol: ProtocolId,
}

impl NexusPorts {
    /// The ports of an iSCSI session: an initiator's name and ISID, a target's name and portal group tag. The relative
    /// port identifier and the target port group are those of the portal group.
    pub fn iscsi(initiator: &str, isid: u64, target: &str, tag: u16) -> NexusPorts {
        NexusPorts {
            initiator: NexusPorts::iscsi_initiator(initiator, isid),
            target: NexusPorts::iscsi_target(target, tag),
            target_device: target.to_string(),
            relative_port: tag,
            port_group: tag,
            protocol: ProtocolId::Iscsi,
        }
    }

    /// The name of an iSCSI initiator port.
    pub(crate) fn iscsi_initiator(name: &str, isid: u64) -> String {
        format!("{name},i,0x{isid:012x}")
    }

    /// The name of an iSCSI target port.
    pub(crate) fn iscsi_target(name: &str, tag: u16) -> String {
        format!("{name},t,0x{tag:04x}")
    }

    /// The ports of a virtual machine at a target of a virtio-scsi controller. The name of the controller, which only one
    /// machine uses at a time, is that of the initiator; each target is a device with one port.
    pub fn virtio(controller: &str, target: u8) -> NexusPorts {
        NexusPorts {
            initiator: controller.to_string(),
            target: format!("target {target}"),
            target_device: String::new(),
            relative_port: 1,
            port_group: 1,
            protocol: ProtocolId::Srp,
        }
    }
}

/// Why a nexus cannot be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// The name of a port is invalid.
    #[error(transparent)]
    Name(#[from] RegistrantError),
    /// There are [`NEXUSES_MAX`].
    #[error("the logical unit has {NEXUSES_MAX} nexuses")]
    TooMany,
}

/// The last copy of a nexus, by the identifier of its list; without one there is nothing to ask for.
pub(crate) type LastCopy = Arc<Mutex<Option<(u8, CopyStatus)>>>;

/// A nexus of a [`LogicalUnit`], made by [`LogicalUnit::attach`]; dropping it is a loss of the nexus.
///
/// Connections of a session share it, on any core. A command costs it two loads, unless there is a unit attention.
#[derive(Debug)]
pub struct UnitNexus {
    unit: Arc<LogicalUnit>,
    id: u64,
    ports: NexusPorts,
    registrant: Registrant,
    deny: Arc<DenyMask>,
    access: Arc<GroupAccess>,
    has_attention: AtomicBool,
    attentions: Mutex<ArrayVec<AdditionalSense, ATTENTIONS_MAX>>,
    copy: LastCopy,
}

impl UnitNexus {
    pub(crate) fn new(
        unit: Arc<LogicalUnit>,
        id: u64,
        ports: NexusPorts,
        registrant: Registrant,
        deny: Arc<DenyMask>,
        access: Arc<GroupAccess>,
    ) -> UnitNexus {
        UnitNexus {
            unit,
            id,
            ports,
            registrant,
            deny,
            access,
            has_attention: AtomicBool::new(false),
            attentions: Mutex::default(),
            copy: LastCopy::default(),
        }
    }

    /// The logical unit.
    pub fn unit(&self) -> &Arc<LogicalUnit> {
        &self.unit
    }

    /// The ports.
    pub fn ports(&self) -> &NexusPorts {
        &self.ports
    }

    /// Unique among the nexuses of the unit, never 0.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Its identity in reservations.
    pub(crate) fn registrant(&self) -> &Registrant {
        &self.registrant
    }

    /// Whether a persistent reservation denies a class of commands.
    #[inline]
    pub(crate) fn is_denied(&self, class: u8) -> bool {
        self.deny.denies(class)
    }

    /// The access state of its target port.
    #[inline]
    pub(crate) fn access(&self) -> AccessState {
        self.access.state()
    }

    /// Establishes a unit attention. One that is pending already is not repeated, and a reset supersedes the others
    /// (SAM-5, section 5.14.4).
    pub fn set_attention(&self, what: AdditionalSense) {
        let mut attentions = sync::lock(&self.attentions);
        if is_reset(what) {
            attentions.clear();
        }
        let is_pending = attentions.contains(&what);
        if !is_pending && attentions.try_push(what).is_err() {
            // What is lost is less than what a reset says.
            attentions.clear();
            attentions.push(AdditionalSense::POWER_ON);
        }
        self.has_attention.store(true, Ordering::Release);
    }

    /// The oldest unit attention, which is cleared.
    #[inline]
    pub(crate) fn take_attention(&self) -> Option<AdditionalSense> {
        if !self.has_attention.load(Ordering::Acquire) {
            return None;
        }
        let mut attentions = sync::lock(&self.attentions);
        let first = attentions.pop_at(0);
        self.has_attention.store(!attentions.is_empty(), Ordering::Release);
        first
    }

    /// The last copy, which the copy itself updates.
    pub(crate) fn last_copy(&self) -> &LastCopy {
        &self.copy
    }

    /// Clears the unit attention of the attachment: the initiator continues what it did through an earlier nexus of the
    /// same ports, as a virtual machine does after a migration.
    pub fn resume(&self) {
        self.clear_attention(AdditionalSense::POWER_ON);
    }

    /// Clears a unit attention that was answered by other means.
    pub(crate) fn clear_attention(&self, what: AdditionalSense) {
        let mut attentions = sync::lock(&self.attentions);
        attentions.retain(|one| *one != what);
        self.has_attention.store(!attentions.is_empty(), Ordering::Release);
    }
}

fn is_reset(what: AdditionalSense) -> bool {
    what.code == AdditionalSense::POWER_ON.code
}

impl Drop for UnitNexus {
    fn drop(&mut self) {
        self.unit.detach(self.id);
    }
}

/// The nexuses of a session by logical unit, for its connections on all cores.
#[derive(Debug, Default)]
pub struct SessionNexuses(Mutex<Vec<(u64, Weak<UnitNexus>)>>);

impl SessionNexuses {
    /// The nexus of a logical unit, which the first connection that asks for it attaches.
    ///
    /// # Errors
    /// Those of `attach`.
    pub fn get_or_attach(
        &self,
        unit: u64,
        attach: impl FnOnce() -> Result<Arc<UnitNexus>, AttachError>,
    ) -> Result<Arc<UnitNexus>, AttachError> {
        let mut nexuses = sync::lock(&self.0);
        let found = nexuses.iter().find(|(id, _)| *id == unit).and_then(|(_, nexus)| nexus.upgrade());
        if let Some(nexus) = found {
            return Ok(nexus);
        }
        let nexus = attach()?;
        nexuses.retain(|(_, nexus)| nexus.strong_count() > 0);
        nexuses.push((unit, Arc::downgrade(&nexus)));
        Ok(nexus)
    }

    /// The session begins anew: nexuses that are there are not shared any more, and end with the last connection that
    /// drops them.
    pub fn forget(&self) {
        sync::lock(&self.0).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_unit;

    #[test]
    fn unit_attentions_are_reported_once_and_superseded_by_resets() {
        let unit = test_unit::unit(512, 64);
        let nexus = test_unit::nexus(&unit, 1);
        assert_eq!(nexus.take_attention(), Some(AdditionalSense::POWER_ON));
        assert_eq!(nexus.take_attention(), None);
        nexus.set_attention(AdditionalSense::MODE_PARAMETERS_CHANGED);
        nexus.set_attention(AdditionalSense::CAPACITY_CHANGED);
        nexus.set_attention(AdditionalSense::MODE_PARAMETERS_CHANGED);
        nexus.clear_attention(AdditionalSense::REPORTED_LUNS_CHANGED);
        assert_eq!(nexus.take_attention(), Some(AdditionalSense::MODE_PARAMETERS_CHANGED));
        nexus.set_attention(AdditionalSense::BUS_DEVICE_RESET);
        assert_eq!(nexus.take_attention(), Some(AdditionalSense::BUS_DEVICE_RESET));
        assert_eq!(nexus.take_attention(), None);
        for qualifier in 0..=ATTENTIONS_MAX as u8 {
            nexus.set_attention(AdditionalSense { code: 0x2a, qualifier });
        }
        assert_eq!((nexus.take_attention(), nexus.take_attention()), (Some(AdditionalSense::POWER_ON), None));
    }

    #[test]
    fn connections_of_a_session_share_a_nexus_until_it_begins_anew() {
        let unit = test_unit::unit(512, 64);
        let nexuses = SessionNexuses::default();
        let attach = || nexuses.get_or_attach(1, || Ok(test_unit::nexus(&unit, 1))).unwrap();
        let first = attach();
        assert!(Arc::ptr_eq(&first, &attach()));
        nexuses.forget();
        let second = attach();
        assert!(!Arc::ptr_eq(&first, &second) && Arc::ptr_eq(&second, &attach()));
    }

    #[test]
    fn ports_of_iscsi_have_the_names_of_rfc_7143() {
        let ports = NexusPorts::iscsi("iqn.a", 0x23d000000, "iqn.b", 16);
        assert_eq!(ports.initiator, "iqn.a,i,0x00023d000000");
        assert_eq!((ports.target.as_str(), ports.target_device.as_str()), ("iqn.b,t,0x0010", "iqn.b"));
    }
}
