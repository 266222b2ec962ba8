//! What reservations promise.
