//! Connections to a Ceph cluster.

use std::ffi::CString;
use std::fmt;
use std::ptr;
use std::sync::Arc;

use crate::functions::{Functions, Handle, functions};
use crate::{RbdError, c_string};

/// How a cluster is found, and what its connection may do.
#[derive(Clone, Debug, Default)]
pub struct ClusterOptions {
    /// The user without `client.`; `None` is `admin`.
    pub user_id: Option<String>,
    /// Configuration file; `None` for Ceph's own search, as `/etc/ceph/ceph.conf` or `CEPH_CONF`.
    pub config_file: Option<String>,
    /// Options instead of a configuration file, which then is not read.
    pub options: Option<Vec<(String, String)>>,
    /// File with the user's key, the option `keyring`.
    pub key_file: Option<String>,
    /// Cores of the threads of librados; empty for those of the calling thread.
    pub cpus: Vec<u32>,
}

/// A connection to a cluster, with threads of its own. Dropped with its last image, and then shut down.
#[derive(Clone)]
pub struct RadosCluster(Arc<ClusterHandle>);

pub(crate) struct ClusterHandle {
    pub(crate) functions: &'static Functions,
    rados: Handle,
    /// Cores of the library's threads; empty for any.
    pub(crate) cpus: Vec<u32>,
}

// SAFETY: librados allows calls with one handle from all threads, and has no state of a thread.
unsafe impl Send for ClusterHandle {}
// SAFETY: as above.
unsafe impl Sync for ClusterHandle {}

impl RadosCluster {
    /// Connects. Waits for a monitor as long as the cluster's option `client_mount_timeout` says, five
    /// minutes by default.
    ///
    /// # Errors
    /// [`RbdError::Load`] without the libraries; [`RbdError::Call`] for a configuration file that cannot be
    /// read, an unknown option, a user that is refused, or no monitor in time.
    pub fn connect(options: &ClusterOptions) -> Result<RadosCluster, RbdError> {
        on_cpus(&options.cpus, || connect(options))?
    }

    pub(crate) fn handle(&self) -> &Arc<ClusterHandle> {
        &self.0
    }
}

/// Runs a call on a thread of its own that may use these cores: threads that the library starts have the
/// cores of the one that creates them, and must not have a reactor's alone.
pub(crate) fn on_cpus<R: Send>(cpus: &[u32], call: impl FnOnce() -> R + Send) -> Result<R, RbdError> {
    let failed =
        |errno: Option<i32>| RbdError::call(-errno.unwrap_or(libc::EIO), || "a thread for Ceph".to_string());
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("rbd-call".to_string());
        let thread = builder.spawn_scoped(scope, || {
            if !cpus.is_empty() {
                let mut set = rustix::thread::CpuSet::new();
                cpus.iter().filter(|cpu| **cpu < CPUS_MAX).for_each(|cpu| set.set(*cpu as usize));
                rustix::thread::sched_setaffinity(None, &set)
                    .map_err(|error| failed(Some(error.raw_os_error())))?;
            }
            Ok(call())
        });
        let thread = thread.map_err(|error| failed(error.raw_os_error()))?;
        thread.join().unwrap_or_else(|_| Err(failed(None)))
    })
}

/// Cores that a set of the kernel's interface has.
const CPUS_MAX: u32 = rustix::thread::CpuSet::MAX_CPU as u32;

fn connect(options: &ClusterOptions) -> Result<RadosCluster, RbdError> {
    let functions = functions()?;
    // Without one the library would have a user without a name, and look for its key.
    let user = options.user_id.as_deref().unwrap_or("admin");
    let c_user = c_string(user)?;
    let mut rados = ptr::null_mut();
    // SAFETY: the handle is written, and the user is a string.
    let result = unsafe { (functions.rados.rados_create)(&raw mut rados, c_user.as_ptr()) };
    if result < 0 {
        return Err(RbdError::call(result, || "cannot create a client of Ceph".to_string()));
    }
    let handle = ClusterHandle { functions, rados, cpus: options.cpus.clone() };
    match (&options.options, &options.config_file) {
        (Some(options), _) => options.iter().try_for_each(|(name, value)| handle.set(name, value))?,
        (None, file) => handle.read_file(file.as_deref())?,
    }
    if let Some(file) = &options.key_file {
        handle.set("keyring", file)?;
    }
    // SAFETY: the handle is of rados_create, and not connected.
    let result = unsafe { (functions.rados.rados_connect)(rados) };
    if result < 0 {
        return Err(RbdError::call(result, || format!("cannot connect to Ceph as client.{user}")));
    }
    Ok(RadosCluster(Arc::new(handle)))
}

impl ClusterHandle {
    fn set(&self, name: &str, value: &str) -> Result<(), RbdError> {
        let (c_name, c_value) = (c_string(name)?, c_string(value)?);
        let set = self.functions.rados.rados_conf_set;
        // SAFETY: the handle is of rados_create, and both are strings.
        let result = unsafe { set(self.rados, c_name.as_ptr(), c_value.as_ptr()) };
        // Without the value: it may be a key.
        if result < 0 { Err(RbdError::call(result, || format!("option {name} of Ceph"))) } else { Ok(()) }
    }

    fn read_file(&self, file: Option<&str>) -> Result<(), RbdError> {
        let path: Option<CString> = file.map(c_string).transpose()?;
        let pointer = path.as_ref().map_or(ptr::null(), |path| path.as_ptr());
        // SAFETY: the handle is of rados_create, and the path is a string or null.
        let result = unsafe { (self.functions.rados.rados_conf_read_file)(self.rados, pointer) };
        if result >= 0 {
            return Ok(());
        }
        Err(RbdError::call(result, || match file {
            Some(file) => format!("configuration file {file} of Ceph"),
            None => {
                "Ceph's configuration file (/etc/ceph/ceph.conf, or give config_file or options)".to_string()
            }
        }))
    }

    /// The I/O context of a pool, and of a namespace in it.
    pub(crate) fn pool(&self, pool: &str, namespace: Option<&str>) -> Result<Handle, RbdError> {
        let name = c_string(pool)?;
        let namespace = namespace.map(c_string).transpose()?;
        let mut context = ptr::null_mut();
        let create = self.functions.rados.rados_ioctx_create;
        // SAFETY: the cluster is connected, the name is a string, and the context is written.
        let result = unsafe { create(self.rados, name.as_ptr(), &raw mut context) };
        if result < 0 {
            return Err(RbdError::call(result, || format!("pool {pool} of Ceph")));
        }
        if let Some(namespace) = namespace {
            // SAFETY: the context is the one just created, and the namespace is a string.
            unsafe { (self.functions.rados.rados_ioctx_set_namespace)(context, namespace.as_ptr()) };
        }
        Ok(context)
    }
}

impl Drop for ClusterHandle {
    fn drop(&mut self) {
        // SAFETY: nothing uses the handle any more: images hold the cluster.
        unsafe { (self.functions.rados.rados_shutdown)(self.rados) };
    }
}

impl fmt::Debug for RadosCluster {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "RadosCluster(threads on {:?})", self.0.cpus)
    }
}
