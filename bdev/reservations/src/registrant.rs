//! Who registers: an NVMe host, or a SCSI nexus.

use std::fmt;
use std::sync::Arc;

/// Longest name of a SCSI port in bytes: an iSCSI name of 223, and its session identifier or portal group tag.
const PORT_NAME_MAX: usize = 256;

/// The identity of a registrant: a kind and bytes that only its protocol interprets.
///
/// Two registrants are the same if kind and bytes are equal. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Registrant {
    kind: RegistrantKind,
    bytes: Arc<[u8]>,
}

/// What the bytes of a [`Registrant`] are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RegistrantKind {
    /// An NVMe host identifier of 16 bytes; one of 64 bits occupies the first eight.
    NvmeHost,
    /// A SCSI I_T nexus: initiator port and target port.
    ScsiNexus,
}

/// The name of a SCSI port is empty, too long, or not printable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the name of a SCSI port is not 1 to 256 bytes without control characters")]
pub struct RegistrantError;

impl Registrant {
    /// An NVMe host, by its identifier. A 64-bit identifier occupies the first eight bytes.
    pub fn nvme_host(id: [u8; 16]) -> Registrant {
        Registrant { kind: RegistrantKind::NvmeHost, bytes: Arc::from(id) }
    }

    /// A SCSI nexus, by the names of its ports, such as iSCSI's `NAME,i,0xISID` and `NAME,t,0xTPGT`.
    ///
    /// # Errors
    /// A name is empty, longer than 256 bytes, or has control characters.
    pub fn scsi_nexus(initiator_port: &str, target_port: &str) -> Result<Registrant, RegistrantError> {
        for port in [initiator_port, target_port] {
            if port.is_empty() || port.len() > PORT_NAME_MAX || port.contains(char::is_control) {
                return Err(RegistrantError);
            }
        }
        // Two bytes of length keep "ab" + "c" and "a" + "bc" apart.
        let length = (initiator_port.len() as u16).to_le_bytes();
        let bytes = [&length, initiator_port.as_bytes(), target_port.as_bytes()].concat();
        Ok(Registrant { kind: RegistrantKind::ScsiNexus, bytes: bytes.into() })
    }

    /// What kind of registrant it is.
    pub fn kind(&self) -> RegistrantKind {
        self.kind
    }

    /// The host identifier of an NVMe host.
    pub fn nvme_host_id(&self) -> Option<[u8; 16]> {
        match self.kind {
            RegistrantKind::NvmeHost => self.bytes.first_chunk().copied(),
            RegistrantKind::ScsiNexus => None,
        }
    }

    /// Initiator port and target port of a SCSI nexus.
    pub fn scsi_ports(&self) -> Option<(&str, &str)> {
        match self.kind {
            RegistrantKind::NvmeHost => None,
            RegistrantKind::ScsiNexus => {
                let (length, names) = self.bytes.split_first_chunk()?;
                std::str::from_utf8(names).ok()?.split_at_checked(u16::from_le_bytes(*length).into())
            }
        }
    }
}

impl fmt::Debug for Registrant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.scsi_ports() {
            Some((initiator, target)) => write!(formatter, "nexus {initiator} - {target}"),
            None => {
                formatter.write_str("host ")?;
                self.bytes.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registrants_are_equal_by_kind_and_identity() {
        let host = Registrant::nvme_host([7; 16]);
        assert_eq!((host.nvme_host_id(), host.scsi_ports()), (Some([7; 16]), None));
        let nexus = |initiator, target| Registrant::scsi_nexus(initiator, target).unwrap();
        let one = nexus("ab", "c");
        assert_eq!((one.nvme_host_id(), one.scsi_ports()), (None, Some(("ab", "c"))));
        assert_eq!(one, nexus("ab", "c"));
        assert_ne!(one, nexus("a", "bc"));
        // A host identifier with the bytes of a nexus.
        let twin = Registrant::nvme_host(*b"\x07\0initiatortarge");
        assert_ne!(twin, nexus("initiat", "ortarge"));
        assert_eq!(format!("{one:?}"), "nexus ab - c");
    }

    #[test]
    fn port_names_are_printable_and_have_a_length_limit() {
        let long = "n".repeat(257);
        for invalid in ["", "a\nb", &long] {
            assert_eq!(Registrant::scsi_nexus(invalid, "c"), Err(RegistrantError));
            assert_eq!(Registrant::scsi_nexus("c", invalid), Err(RegistrantError));
        }
        assert!(Registrant::scsi_nexus(&long[1..], &long[1..]).is_ok());
    }
}
