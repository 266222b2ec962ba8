//! Locks that outlive a panic.
//!
//! `std` marks a mutex as poisoned when a thread panics while it holds the lock. In Ringbolt no code panics between two
//! changes that belong together, so what the mutex guards is consistent even then, and one failed task must not take
//! every other core down with it. [`lock`], [`read`], [`write`], [`wait`] and [`wait_timeout`] therefore take a poisoned lock
//! like any other. A type whose changes can panic half-way must not use them.
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! let count = Arc::new(Mutex::new(7));
//! let shared = count.clone();
//! let panicked = std::thread::spawn(move || {
//!     let _guard = sync::lock(&shared);
//!     panic!("with the lock held");
//! });
//! assert!(panicked.join().is_err() && count.is_poisoned());
//! assert_eq!(*sync::lock(&count), 7);
//! ```
#![forbid(unsafe_code)]

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

/// Locks `mutex`, whether it is poisoned or not.
#[inline]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `lock` as one of its readers, whether it is poisoned or not.
pub fn read<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `lock` as its writer, whether it is poisoned or not.
pub fn write<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Releases the lock, waits for a notification of `condvar`, and locks again. Wake-ups may be spurious.
pub fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// [`wait`], for at most `timeout`.
pub fn wait_timeout<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    timeout: Duration,
) -> MutexGuard<'a, T> {
    condvar.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner).0
}
