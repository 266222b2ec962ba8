//! Reads of the volumes of a chain, and lists of what is written in them.

use bdev::Request;
use block_io::Status;
use sockets::CoreNetwork;
use wire_replica::{ClientRequest, Listing, decode_list};
use wire_store::BlockBitmap;

use super::{ImageChannel, Owner, status_of_end};
use crate::attach::AttachStatus;
use crate::layers::VolumeChannel;

impl<N: CoreNetwork> VolumeChannel for ImageChannel<N> {
    fn read_volume(&mut self, volume: u64, request: Request) -> Result<(), Request> {
        self.accept(request, volume)
    }

    fn list_written(&mut self, key: u64, volume: u64, index: u32) -> bool {
        self.follow_aborts();
        let attached = self.attach.status();
        if attached != AttachStatus::Live {
            self.written.push_back((key, Err(status_of_end(attached))));
            return true;
        }
        if !self.has_numbers() {
            return false;
        }
        let group = self.placement.of(volume).group_of(index);
        let object = Listing::Written { volume, index }.object(group);
        let (client, number, length) = (self.client, self.next_number, Listing::WRITTEN_BYTES as u32);
        self.begin(
            Owner::Written(key),
            group,
            ClientRequest::Read { client, number, object, offset: 0, length },
        );
        true
    }

    fn take_written(&mut self) -> Option<(u64, Result<BlockBitmap, Status>)> {
        self.written.pop_front()
    }

    fn set_head(&mut self, volume: u64) {
        if volume != self.placement.volume {
            // A session is of one volume.
            self.end_sessions();
            self.placement = self.placement.of(volume);
            self.start_sessions();
        }
    }
}

/// The answer to a list of written blocks.
pub(super) fn written_blocks(status: Status, data: Option<&[u8]>) -> Result<BlockBitmap, Status> {
    let Some(data) = data.filter(|_| status.is_success()) else {
        return Err(if status.is_success() { Status::INTERNAL_ERROR } else { status });
    };
    match decode_list::<BlockBitmap>(data) {
        Ok(Some((bitmaps, _))) if bitmaps.len() == 1 => Ok(bitmaps[0]),
        _ => {
            log::error!(
                "a node does not say which blocks are written: images with snapshots or a parent need nodes of this release"
            );
            Err(Status::INTERNAL_ERROR)
        }
    }
}

#[cfg(test)]
mod tests {
    use wire_replica::encode_list;

    use super::*;

    #[test]
    fn nodes_that_do_not_say_what_is_written_are_an_error_and_not_zeroes() {
        let answer = encode_list([BlockBitmap::of(1..3)], Listing::WRITTEN_BYTES);
        assert_eq!(written_blocks(Status::SUCCESS, Some(&answer)), Ok(BlockBitmap::of(1..3)));
        let older = [0; Listing::WRITTEN_BYTES];
        assert_eq!(written_blocks(Status::SUCCESS, Some(&older)), Err(Status::INTERNAL_ERROR));
        assert_eq!(written_blocks(Status::SUCCESS, None), Err(Status::INTERNAL_ERROR));
        assert_eq!(written_blocks(Status::ACCESS_DENIED, None), Err(Status::ACCESS_DENIED));
    }
}
