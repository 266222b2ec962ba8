//! The list of transports.

use crate::transport::TransportKind;
use crate::{ListenAddress, NvmfTargetError};

/// Every transport, in the order in which they are reported and saved.
pub(crate) static TRANSPORTS: &[&dyn TransportKind] = &[
    &crate::tcp::Tcp,
    &crate::rdma::Rdma,
    &crate::vfio_user::VfioUser,
    #[cfg(test)]
    &crate::test_transport::TestTransport,
];

/// The transport with a name, in any case of letters.
pub(crate) fn by_name(trtype: &str) -> Option<&'static dyn TransportKind> {
    TRANSPORTS.iter().find(|kind| kind.name().eq_ignore_ascii_case(trtype)).copied()
}

/// The names of all transports, as a list with `last` before the last one.
pub(crate) fn names(last: &str) -> String {
    let names: Vec<&str> = TRANSPORTS.iter().map(|kind| kind.name()).collect();
    match &names[..] {
        [one] => (*one).to_string(),
        [others @ .., one] => format!("{} {last} {one}", others.join(", ")),
        [] => String::new(),
    }
}

/// Where a transport is in [`TRANSPORTS`].
pub(crate) fn position(kind: &dyn TransportKind) -> usize {
    TRANSPORTS.iter().take_while(|other| other.name() != kind.name()).count()
}

impl ListenAddress {
    /// The transport that it is an address of.
    ///
    /// # Errors
    /// There is no such transport.
    pub(crate) fn kind(&self) -> Result<&'static dyn TransportKind, NvmfTargetError> {
        by_name(&self.trtype).ok_or_else(|| NvmfTargetError::Transport(self.trtype.clone(), names("and")))
    }

    /// The canonical form, which is stored and compared.
    pub(crate) fn normalized(&self) -> Result<ListenAddress, NvmfTargetError> {
        self.kind()?.normalize(self)
    }
}
