//! Locks that outlive a panic.
//!
//! `std` marks a mutex as poisoned when a thread panics while it holds the lock. In Ringbolt no code panics between two
//! changes that belong together, so what the mutex guards is consistent even then, and one failed task must not take
//! every other core down with it. [`lock`] therefore takes a poisoned mutex like any other. A type whose changes can
//! panic half-way must not use it.
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

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, whether it is poisoned or not.
#[inline]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
