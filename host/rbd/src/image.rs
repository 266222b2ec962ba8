//! Images, open.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::cluster::{ClusterHandle, on_cpus};
use crate::functions::{Functions, Handle, ImageInfo};
use crate::{RadosCluster, RbdError, c_string};

/// Names an image of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct ImageName<'a> {
    /// The pool.
    pub pool: &'a str,
    /// The namespace in the pool; `None` is the default one.
    pub namespace: Option<&'a str>,
    /// The image, without a snapshot.
    pub image: &'a str,
}

type Notify = Box<dyn Fn() + Send + Sync>;

/// An open image. While it is open, Ceph refuses to remove it: it has a watcher.
///
/// Dropping it closes it on a thread, because that waits for the cluster.
pub struct Image {
    open: Option<OpenImage>,
    closed: Arc<ImageClosed>,
}

/// Whether an image is closed.
#[derive(Default)]
pub struct ImageClosed {
    is_closed: Mutex<bool>,
    changed: Condvar,
}

struct OpenImage {
    cluster: Arc<ClusterHandle>,
    context: Handle,
    image: Handle,
    is_read_only: bool,
    /// The handle of a watch, and what it calls.
    watch: Option<(u64, Box<Notify>)>,
}

// SAFETY: librbd allows calls with one image from all threads, and has no state of a thread; what the watch
// calls is `Send` and `Sync`.
unsafe impl Send for OpenImage {}
// SAFETY: as above.
unsafe impl Sync for OpenImage {}

impl Image {
    /// Opens an image. Waits for the cluster.
    ///
    /// # Errors
    /// [`RbdError::Call`]: `ENOENT` if there is no such pool or image.
    pub fn open(cluster: &RadosCluster, name: ImageName<'_>, is_read_only: bool) -> Result<Image, RbdError> {
        let cluster = cluster.handle().clone();
        let cpus = cluster.cpus.clone();
        on_cpus(&cpus, || open_image(cluster, name, is_read_only))?
    }

    /// Calls `notify`, on a thread of librados, whenever the image's size or another property may have
    /// changed. It must not wait, and not call the image.
    ///
    /// # Errors
    /// [`RbdError::Call`].
    pub fn watch(&mut self, notify: impl Fn() + Send + Sync + 'static) -> Result<(), RbdError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let notify: Box<Notify> = Box::new(Box::new(notify));
        let mut handle = 0;
        let argument = ptr::from_ref::<Notify>(&notify).cast_mut().cast::<c_void>();
        let watch = open.cluster.functions.rbd.rbd_update_watch;
        // SAFETY: the image is open, the handle is written, and what the callback gets is kept until the
        // watch has ended.
        let result = unsafe { watch(open.image, &raw mut handle, updated, argument) };
        if result < 0 {
            return Err(RbdError::call(result, || "cannot watch an image of Ceph".to_string()));
        }
        open.watch = Some((handle, notify));
        Ok(())
    }

    /// The size in bytes. Waits for the cluster after a change.
    ///
    /// # Errors
    /// [`RbdError::Call`].
    pub fn bytes(&self) -> Result<u64, RbdError> {
        let (functions, image) = self.parts();
        let mut bytes = 0;
        // SAFETY: the image is open, and the size is written.
        let result = unsafe { (functions.rbd.rbd_get_size)(image, &raw mut bytes) };
        if result < 0 {
            return Err(RbdError::call(result, || "the size of an image of Ceph".to_string()));
        }
        Ok(bytes)
    }

    /// The size in bytes of the objects that it is stored in.
    ///
    /// # Errors
    /// [`RbdError::Call`].
    pub fn object_bytes(&self) -> Result<u64, RbdError> {
        let (functions, image) = self.parts();
        let mut info = ImageInfo::default();
        // SAFETY: the image is open, and a structure of this size is written.
        let result = unsafe { (functions.rbd.rbd_stat)(image, &raw mut info, size_of::<ImageInfo>()) };
        if result < 0 {
            return Err(RbdError::call(result, || "the properties of an image of Ceph".to_string()));
        }
        Ok(info.object_bytes)
    }

    /// Changes the size. Waits for the cluster; what is cut off is removed.
    ///
    /// # Errors
    /// [`RbdError::Call`]: `EROFS` of one that is open for reads only.
    pub fn resize(&self, bytes: u64) -> Result<(), RbdError> {
        let (functions, image) = self.parts();
        // SAFETY: the image is open.
        let result: c_int = unsafe { (functions.rbd.rbd_resize)(image, bytes) };
        if result < 0 {
            return Err(RbdError::call(result, || {
                format!("cannot resize an image of Ceph to {bytes} bytes")
            }));
        }
        Ok(())
    }

    /// Whether it was opened for reads only.
    pub fn is_read_only(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.is_read_only)
    }

    /// What to wait for after the last use.
    pub fn closed(&self) -> Arc<ImageClosed> {
        self.closed.clone()
    }

    /// The functions, and the open image.
    pub(crate) fn parts(&self) -> (&'static Functions, Handle) {
        let Some(open) = &self.open else { unreachable!("an image is open until it is dropped") };
        (open.cluster.functions, open.image)
    }
}

fn open_image(
    cluster: Arc<ClusterHandle>,
    name: ImageName<'_>,
    is_read_only: bool,
) -> Result<Image, RbdError> {
    let c_name = c_string(name.image)?;
    let context = cluster.pool(name.pool, name.namespace)?;
    let mut open = OpenImage { context, image: ptr::null_mut(), is_read_only, watch: None, cluster };
    let rbd = &open.cluster.functions.rbd;
    let open_image = if is_read_only { rbd.rbd_open_read_only } else { rbd.rbd_open };
    let mut image = ptr::null_mut();
    // SAFETY: the context is of the pool, the name is a string, there is no snapshot, and the image is
    // written.
    let result = unsafe { open_image(context, c_name.as_ptr(), &raw mut image, ptr::null()) };
    if result < 0 {
        return Err(RbdError::call(result, || format!("image {} of pool {} of Ceph", name.image, name.pool)));
    }
    open.image = image;
    Ok(Image { open: Some(open), closed: Arc::default() })
}

impl ImageClosed {
    /// Waits until the image is closed, for at most `timeout`. Returns whether it is.
    pub fn wait(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        let mut is_closed = sync::lock(&self.is_closed);
        while !*is_closed {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            is_closed =
                self.changed.wait_timeout(is_closed, left).unwrap_or_else(|error| error.into_inner()).0;
        }
        true
    }
}

extern "C" fn updated(argument: *mut c_void) {
    // SAFETY: the argument is that of the watch, which has not ended.
    let notify = unsafe { &*argument.cast::<Notify>() };
    notify();
}

impl Drop for Image {
    fn drop(&mut self) {
        let Some(open) = self.open.take() else { return };
        let closed = self.closed.clone();
        let close = move || {
            drop(open);
            *sync::lock(&closed.is_closed) = true;
            closed.changed.notify_all();
        };
        // Without a thread the closure is dropped, and with it the image, here.
        if let Err(error) = std::thread::Builder::new().name("rbd-close".to_string()).spawn(close) {
            log::warn!(target: "rbd", "an image was closed without a thread: {error}");
        }
    }
}

impl Drop for OpenImage {
    fn drop(&mut self) {
        let functions = self.cluster.functions;
        if let Some((handle, notify)) = self.watch.take() {
            // SAFETY: the image is open, and the handle is that of its watch.
            let result = unsafe { (functions.rbd.rbd_update_unwatch)(self.image, handle) };
            if result < 0 {
                // It may be called still.
                std::mem::forget(notify);
            }
        }
        if !self.image.is_null() {
            // SAFETY: the image is open, and no operation is in flight: a queue with one keeps the image.
            let result = unsafe { (functions.rbd.rbd_close)(self.image) };
            if result < 0 {
                let error = std::io::Error::from_raw_os_error(-result);
                log::error!(target: "rbd", "an image was closed with an error: {error}; unflushed writes may be lost");
            }
        }
        // SAFETY: the context is the image's alone, which is closed.
        unsafe { (functions.rados.rados_ioctx_destroy)(self.context) };
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Image(read-only: {})", self.is_read_only())
    }
}
