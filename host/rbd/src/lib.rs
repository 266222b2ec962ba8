//! Images of Ceph's RADOS block device, through librbd and librados.
//!
//! The libraries are loaded when the first [`RadosCluster`] connects, so that a program without Ceph needs
//! neither. An [`Image`] is opened on a cluster, once in a process, and an [`ImageQueue`] is one core's queue
//! of operations on it. Operations complete on threads of librados, which send a message to the core's
//! mailbox: the data never leaves the queue while the library may use it.
//!
//! Connecting, opening, resizing and closing wait for the cluster, without a limit but that of its options:
//! control threads call them.
//!
//! ```no_run
//! use std::sync::Arc;
//! use rbd::{RadosCluster, ClusterOptions, Image, ImageName, ImageOperation, ImageQueue};
//! let cluster = RadosCluster::connect(&ClusterOptions::default())?;
//! let name = ImageName { pool: "rbd", namespace: None, image: "disk" };
//! let image = Arc::new(Image::open(&cluster, name, false)?);
//! let reactor = reactor::Reactor::new(&reactor::ReactorConfig::default()).expect("a reactor");
//! let mut queue = ImageQueue::new(&image, &reactor.core(), 16);
//! assert!(queue.start(ImageOperation::Flush, 0, 0, None, 7).is_ok());
//! # Ok::<(), rbd::RbdError>(())
//! ```
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod cluster;
mod functions;
mod image;
mod queue;

pub use cluster::{ClusterOptions, RadosCluster};
pub use functions::LibraryLoadError;
pub use image::{Image, ImageClosed, ImageName};
pub use queue::{ImageCompletion, ImageOperation, ImageQueue, QUEUE_DEPTH_MAX, SLICES_MAX};

/// Why a call of Ceph's libraries failed.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// The libraries cannot be used.
    #[error(transparent)]
    Load(#[from] LibraryLoadError),
    /// A name has a NUL byte.
    #[error("{0:?} has a NUL byte")]
    Nul(String),
    /// A call failed.
    #[error("{doing}: {}", std::io::Error::from_raw_os_error(*errno))]
    Call {
        /// What was to be done, with the names that matter.
        doing: String,
        /// The error number, positive.
        errno: i32,
    },
}

impl RbdError {
    /// The error of a call that returned `result`, which is negative.
    fn call(result: i32, doing: impl FnOnce() -> String) -> RbdError {
        RbdError::Call { doing: doing(), errno: result.saturating_neg().max(1) }
    }

    /// The error number of a call that failed.
    pub fn errno(&self) -> Option<i32> {
        match self {
            RbdError::Call { errno, .. } => Some(*errno),
            _ => None,
        }
    }
}

/// A name as the libraries take it.
fn c_string(text: &str) -> Result<std::ffi::CString, RbdError> {
    std::ffi::CString::new(text).map_err(|_| RbdError::Nul(text.to_string()))
}
