//! Sessions of clients: entries of the log that open and end them.
//!
//! A client opens a session in a logical group before its first write there, for a volume and at the attach
//! epoch of the image. Such an entry removes an object that never exists, so that nodes of versions without
//! sessions apply it as nothing.

use wire_store::{EntryHeader, ObjectId, Operation};

use crate::Listing;

/// The upper half of the suffix of objects that name sessions; the lower half is the attach epoch.
const SESSION_MARK: u64 = 0x5345_5353 << 32;
const MARK: u64 = !0 << 32;
const OPEN: u32 = 0;
const END: u32 = 1;

/// What an entry does to a session of its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionChange {
    /// Opens it, or says that the client lives. Sessions of the volume at lower attach epochs end.
    Open {
        /// The volume that the client writes.
        volume: u64,
        /// The attach epoch of its image.
        attach_epoch: u32,
    },
    /// Ends it: the client has closed it, or was silent for too long.
    End {
        /// The volume that the client wrote.
        volume: u64,
    },
}

impl SessionChange {
    /// What an operation does to the session of its client; `None` if it concerns data.
    pub fn of(header: &EntryHeader) -> Option<SessionChange> {
        let ObjectId { volume, index, suffix, .. } = header.object;
        if suffix & MARK != SESSION_MARK || header.operation != Operation::Remove {
            return None;
        }
        match index {
            OPEN => Some(SessionChange::Open { volume, attach_epoch: suffix as u32 }),
            END => Some(SessionChange::End { volume }),
            _ => None,
        }
    }

    /// The operation that does this to a session in a group. Client and number are added.
    pub fn header(self, group: u32) -> EntryHeader {
        let (volume, index, attach_epoch) = match self {
            SessionChange::Open { volume, attach_epoch } => (volume, OPEN, attach_epoch),
            SessionChange::End { volume } => (volume, END, 0),
        };
        let object = ObjectId { group, volume, index, suffix: SESSION_MARK | u64::from(attach_epoch) };
        EntryHeader::new(Operation::Remove, object, 0, 0)
    }
}

/// Whether an object has data: others name sessions and listings.
pub fn is_data_object(object: ObjectId) -> bool {
    object.suffix & MARK != SESSION_MARK && Listing::of(object).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_a_session_is_an_operation_that_nothing_else_is() {
        for change in [
            SessionChange::Open { volume: u64::MAX, attach_epoch: u32::MAX },
            SessionChange::Open { volume: 7, attach_epoch: 1 },
            SessionChange::End { volume: 7 },
        ] {
            let header = change.header(3);
            assert_eq!(SessionChange::of(&header), Some(change));
            assert!(!is_data_object(header.object));
            // A version without sessions takes it for the removal of an object that does not exist.
            let bytes = header.encode([0; 16], 0);
            assert_eq!(EntryHeader::decode(&bytes, [0; 16], 0), Ok(header.clone()));
            let unknown = ObjectId { index: 2, ..header.object };
            assert_eq!(SessionChange::of(&EntryHeader { object: unknown, ..header }), None);
        }
        let object = ObjectId { group: 3, volume: 7, index: 0, suffix: 0 };
        assert_eq!(SessionChange::of(&EntryHeader::new(Operation::Remove, object, 0, 0)), None);
        assert!(is_data_object(object));
    }
}
