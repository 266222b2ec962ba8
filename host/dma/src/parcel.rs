//! Data on another core.

use std::fmt;
use std::mem::ManuallyDrop;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::buffer::{Buffer, BufferAccess, Home};
use crate::data::Data;
use crate::external::{ExternalEntry, ExternalSource};
use crate::pool::Pool;

/// [`Data`] on its way to another core, and back.
///
/// A parcel is `Send`. The core that receives it [adopts](Pool::adopt) it as data of its own pool, to be split, shared
/// and given to devices like any other. Once the last of these buffers is dropped, or the parcel itself, wherever
/// that is, the data goes home: it is queued at its own core, which frees it in [`Pool::collect`]. A parcel costs no
/// atomic operation per slice, and one uncontended lock when it goes home.
pub struct Parcel {
    /// Only moved, and its addresses read, until it is home: counts belong to its core.
    data: ManuallyDrop<Data>,
    home: Arc<Returns>,
}

// SAFETY: off its core a parcel's data is only moved and its addresses, lengths and kinds are read; its
// reference counts are touched by its own core alone, in `Pool::collect` and, through `adopt`, where the pool is the
// same. While it is a parcel no buffer of these bytes can write them on its own core: exclusive ones are inside of it.
unsafe impl Send for Parcel {}

/// Data that other cores are done with, on its way home.
#[derive(Default)]
pub(crate) struct Returns {
    /// Whether `queue` may hold something: read without the lock.
    pending: AtomicBool,
    queue: Mutex<Vec<Returned>>,
    waker: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

struct Returned(#[expect(dead_code, reason = "kept for its drop")] Data);

// SAFETY: only moved until its own core takes it out of the queue. The queue itself is never dropped with data in it:
// the data's pool keeps the queue, and the data keeps its pool.
unsafe impl Send for Returned {}

impl Data {
    /// Data that can be sent to another core.
    pub fn into_parcel(self) -> Parcel {
        let home = self.slices()[0].pool().returns.clone();
        Parcel { data: ManuallyDrop::new(self), home }
    }
}

impl Parcel {
    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Whether there are none, which there never are.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Parcel {
    fn drop(&mut self) {
        // SAFETY: `data` is not used after this: the parcel is being dropped.
        let data = unsafe { ManuallyDrop::take(&mut self.data) };
        sync::lock(&self.home.queue).push(Returned(data));
        if !self.home.pending.swap(true, Ordering::AcqRel)
            && let Some(wake) = self.home.waker.get()
        {
            wake();
        }
    }
}

impl fmt::Debug for Parcel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Parcel({} bytes)", self.len())
    }
}

impl Pool {
    /// Makes a parcel's data usable on this core. On the core that it came from this is the data itself.
    ///
    /// # Errors
    /// Gives the parcel back when 65,536 external regions and parcels are in use here.
    pub fn adopt(&self, parcel: Parcel) -> Result<Data, Parcel> {
        let slices = parcel.data.slices();
        // Addresses are compared, no count is touched.
        if slices.iter().all(|slice| Rc::ptr_eq(slice.pool(), &self.0)) {
            let mut parcel = ManuallyDrop::new(parcel);
            // SAFETY: the parcel is not used or dropped after this, and this is its data's own core: a pool
            // does not leave the thread that created it.
            let data = unsafe { ManuallyDrop::take(&mut parcel.data) };
            // SAFETY: as above; read once, and never dropped.
            drop(unsafe { std::ptr::read(&parcel.home) });
            return Ok(data);
        }
        if let [slice] = slices {
            let (start, len, access, chunk) = self.describe(slice);
            let entry =
                ExternalEntry { source: Some(ExternalSource::Parcel(parcel)), live: 1, ended: true, chunk };
            return match self.0.add_external(entry) {
                Ok(index) => {
                    Ok(Buffer::new(start, self.0.clone(), len, index, Home::External, access).into())
                }
                Err(entry) => match entry.source {
                    Some(ExternalSource::Parcel(parcel)) => Err(parcel),
                    _ => unreachable!("the entry that was refused"),
                },
            };
        }
        if !self.0.has_room_for_external(slices.len()) {
            return Err(parcel);
        }
        let parcel = Rc::new(parcel);
        let adopted = parcel.data.slices().iter().map(|slice| {
            let (start, len, access, chunk) = self.describe(slice);
            let entry = ExternalEntry {
                source: Some(ExternalSource::Slices(parcel.clone())),
                live: 1,
                ended: true,
                chunk,
            };
            let index = self.0.add_external(entry).ok().expect("room was checked");
            Buffer::new(start, self.0.clone(), len, index, Home::External, access)
        });
        Ok(Data::gather(adopted.collect()).expect("a parcel is not empty"))
    }

    /// Of a slice of another core: where it is, and its chunk if that is one of our arena.
    fn describe(&self, slice: &Buffer) -> (std::ptr::NonNull<u8>, u32, BufferAccess, Option<u16>) {
        let ours = !slice.is_adopted() && Arc::ptr_eq(slice.arena(), &self.0.arena);
        let chunk = ours.then_some(slice.backing_index() as u16);
        (slice.start(), slice.len() as u32, slice.access(), chunk)
    }

    /// Frees what other cores have sent home; returns the number of parcels. A reactor calls this when
    /// [`on_return`](Self::on_return) reports some, and [`take`](Self::take) before it draws on the arena. Without any
    /// it costs one load.
    #[inline]
    pub fn collect(&self) -> usize {
        if !self.0.returns.pending.load(Ordering::Relaxed) {
            return 0;
        }
        self.collect_pending()
    }

    #[cold]
    fn collect_pending(&self) -> usize {
        let returns = &self.0.returns;
        let mut queue = sync::lock(&returns.queue);
        // Under the lock: the next push sets it again.
        returns.pending.store(false, Ordering::Release);
        let returned = std::mem::take(&mut *queue);
        drop(queue);
        returned.len()
    }

    /// Sets what is called, on the thread of another core, when the first parcel has come home since the last
    /// [`collect`](Self::collect): a reactor wakes up. The first call decides.
    pub fn on_return(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.returns.waker.set(Box::new(wake));
    }
}

#[cfg(test)]
mod tests;
