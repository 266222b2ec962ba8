//! Which function: a PCI address, or the socket of a device behind vfio-user.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use pci::PciAddress;

/// Where a function is: `0000:00:04.0`, or `vfio-user:PATH` for a device that another process serves.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IoatAddress {
    /// A PCI function that is bound to `vfio-pci` or `uio_pci_generic`.
    Pci(PciAddress),
    /// A socket, or a directory with a socket `cntrl`.
    VfioUser(PathBuf),
}

/// The text is no address of a function.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither a PCI address, such as 0000:00:04.0, nor vfio-user:PATH")]
pub struct InvalidIoatAddress(String);

const VFIO_USER: &str = "vfio-user:";

impl FromStr for IoatAddress {
    type Err = InvalidIoatAddress;

    fn from_str(text: &str) -> Result<IoatAddress, InvalidIoatAddress> {
        let invalid = || InvalidIoatAddress(text.to_string());
        match text.strip_prefix(VFIO_USER) {
            Some("") => Err(invalid()),
            Some(path) => Ok(IoatAddress::VfioUser(path.into())),
            None => text.parse().map(IoatAddress::Pci).map_err(|_| invalid()),
        }
    }
}

impl fmt::Display for IoatAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IoatAddress::Pci(address) => address.fmt(formatter),
            IoatAddress::VfioUser(path) => write!(formatter, "{VFIO_USER}{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_pci_functions_or_sockets() {
        for text in ["0000:00:04.1", "vfio-user:/run/ioat0"] {
            assert_eq!(text.parse::<IoatAddress>().unwrap().to_string(), text);
        }
        assert_eq!("00:04.1".parse(), "0000:00:04.1".parse::<IoatAddress>());
        for text in ["", "vfio-user:", "/run/ioat0", "0000:00:04"] {
            let error = text.parse::<IoatAddress>().unwrap_err();
            assert!(error.to_string().contains("neither a PCI address"), "{error}");
        }
    }
}
