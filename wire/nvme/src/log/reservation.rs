//! Reservation Notification log page (Base 2.0, section 5.16.1.24).

use crate::DecodeError;
use crate::le::{put32, put64, u32_at, u64_at};

wire_enum! {
    /// What happened to reservations of a namespace.
    NotificationType: u8 {
        /// Nothing: there is no notification.
        Empty = 0,
        /// The host's registration was preempted.
        RegistrationPreempted = 1,
        /// The reservation was released.
        ReservationReleased = 2,
        /// The reservation was preempted: it and all registrations were cleared.
        ReservationPreempted = 3,
    }
}

/// One notification; reading the page takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationNotification {
    /// Counts notifications, and goes on where one had no room; 0 for none.
    pub count: u64,
    /// What happened.
    pub kind: NotificationType,
    /// Unread notifications besides this one, 255 at most.
    pub available: u8,
    /// Of which namespace.
    pub nsid: u32,
}

impl ReservationNotification {
    /// Bytes of the page.
    pub const SIZE: usize = 64;
    /// What is read where there is nothing to tell.
    pub const EMPTY: ReservationNotification =
        ReservationNotification { count: 0, kind: NotificationType::Empty, available: 0, nsid: 0 };

    /// Reads the page.
    ///
    /// # Errors
    /// Reserved types.
    pub fn decode(from: &[u8; Self::SIZE]) -> Result<ReservationNotification, DecodeError> {
        let kind = NotificationType::from_wire(from[8]);
        let kind = kind.ok_or(DecodeError::value("reservation notification type", 8, from[8].into()))?;
        Ok(ReservationNotification {
            count: u64_at(from, 0),
            kind,
            available: from[9],
            nsid: u32_at(from, 12),
        })
    }

    /// Writes the page.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        into.fill(0);
        put64(into, 0, self.count);
        into[8] = self.kind.to_wire();
        into[9] = self.available;
        put32(into, 12, self.nsid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that nvme-cli's `resv-notif-log` reads: count, type, pages left, namespace.
    #[test]
    fn a_notification_is_its_bytes() {
        let mut bytes = [0xa5; ReservationNotification::SIZE];
        let view = ReservationNotification {
            count: 0x0102_0304_0506_0708,
            kind: NotificationType::ReservationReleased,
            available: 3,
            nsid: 0x11,
        };
        view.encode(&mut bytes);
        let mut expected = [0; ReservationNotification::SIZE];
        expected[..16].copy_from_slice(&[8, 7, 6, 5, 4, 3, 2, 1, 2, 3, 0, 0, 0x11, 0, 0, 0]);
        assert_eq!(bytes, expected);
        assert_eq!(ReservationNotification::decode(&bytes), Ok(view));
        bytes[8] = 4;
        assert!(ReservationNotification::decode(&bytes).is_err());
        assert_eq!(ReservationNotification::decode(&[0; 64]), Ok(ReservationNotification::EMPTY));
    }
}
