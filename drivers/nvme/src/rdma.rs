//! NVMe/RDMA: a queue pair of an RDMA device, for the associations of [`fabrics`](crate::fabrics).

mod connection;

use std::borrow::Cow;

pub use connection::{RdmaConnection, RdmaRemote};

use crate::fabrics::Association;
use crate::options::Options;
use crate::uri::RdmaUri;

/// An association of this host with one controller over RDMA.
pub type RdmaAssociation = Association<RdmaConnection>;

impl RdmaUri {
    /// The options with those that this names.
    pub(crate) fn options<'a>(&self, options: &'a Options) -> Cow<'a, Options> {
        let mut options = Cow::Borrowed(options);
        if let Some(hostnqn) = &self.hostnqn {
            options.to_mut().hostnqn = Some(hostnqn.clone());
        }
        options
    }
}
