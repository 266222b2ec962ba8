//! Reads of the volumes of a chain, and lists of what is written in them.

use bdev::Request;
use block_io::Status;
use sockets::CoreNetwork;
use wire_replica::{ClientRequest, Listing};
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
