//! What a controller is attached with.

use crate::multipath::Policy;
use crate::path::PathConfig;

/// What happens when a controller is attached under a name that is in use (SPDK's `multipath` parameter).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MultipathMode {
    /// It is rejected.
    Disable,
    /// It becomes a path for failover, with the policy active-passive.
    Failover,
    /// It becomes a path, used according to the policy.
    #[default]
    Multipath,
}

/// Parameters of [`Initiator::attach`](crate::Initiator::attach).
#[derive(Clone, Debug)]
pub struct Attach {
    /// Name of the controller; namespace 1 becomes the bdev `NAMEn1`.
    pub name: String,
    /// Address and configuration of the path.
    pub path: PathConfig,
    /// What to do if the name is in use.
    pub multipath: MultipathMode,
    /// Path selection policy; applied with the first path of a name.
    pub policy: Policy,
    /// Maximum retries of an I/O for errors that are not path related.
    pub retries_max: u16,
    /// Whether a discovery service attaches it.
    pub discovered: bool,
}

impl Attach {
    /// Defaults: multipath, active-passive, 3 retries.
    pub fn new(name: &str, path: PathConfig) -> Attach {
        Attach {
            name: name.to_string(),
            path,
            multipath: MultipathMode::default(),
            policy: Policy::ActivePassive,
            retries_max: 3,
            discovered: false,
        }
    }
}
