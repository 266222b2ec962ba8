//! With what a server proves itself.

use std::sync::Arc;

use crate::certificates::Certificates;
use crate::psk::PskSource;

/// With what a server proves itself to its clients, and they to it.
#[derive(Clone, Default)]
pub struct ServerCredentials {
    /// The keys of its clients.
    pub psks: Option<Arc<dyn PskSource>>,
    /// Its certificate, for clients that offer none of these keys.
    pub certificates: Option<Certificates>,
}

impl ServerCredentials {
    /// Keys alone: a client without one is refused.
    pub fn of_keys(psks: Arc<dyn PskSource>) -> ServerCredentials {
        ServerCredentials { psks: Some(psks), certificates: None }
    }
}

impl std::fmt::Debug for ServerCredentials {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ServerCredentials { psks, certificates } = self;
        let mut shown = formatter.debug_struct("ServerCredentials");
        shown.field("psks", &psks.is_some()).field("certificates", &certificates.is_some()).finish()
    }
}
