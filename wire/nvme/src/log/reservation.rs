//! Reservation Notification log page (Base 2.0, section 5.16.1.24).

use crate::DecodeError;
use crate::le::{put32, put64, u32_at, u64_at};

wire_enum! {
    /// Reservation Notification Log Page Type.
    NotificationType: u8 {
        /// Empty log page.
        Empty = 0,
        /// Registration Preempted.
        RegistrationPreempted = 1,
        /// Reservation Released.
        ReservationReleased = 2,
        /// Reservation Preempted: the reservation and all registrations were cleared.
        ReservationPreempted = 3,
    }
}

/// A reservation notification; reading the log page removes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationNotification {
    /// Log Page Count: incremented with each notification, including lost ones; 0 for an empty page.
    pub count: u64,
    /// Notification type.
    pub kind: NotificationType,
    /// Number of Available Log Pages: further unread notifications, at most 255.
    pub available: u8,
    /// Namespace identifier.
    pub nsid: u32,
}

impl ReservationNotification {
    /// Size in bytes of the page.
    pub const SIZE: usize = 64;
    /// The empty page.
    pub const EMPTY: ReservationNotification =
        ReservationNotification { count: 0, kind: NotificationType::Empty, available: 0, nsid: 0 };

    /// Decodes the page.
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

    /// Encodes the page.
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

    /// The layout that nvme-cli's `resv-notif-log` decodes: count, type, available pages, namespace.
    #[test]
    fn a_notification_has_the_layout_of_nvme_cli() {
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
