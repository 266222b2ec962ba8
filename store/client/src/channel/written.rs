//! Answers to lists of what is written.

use block_io::Status;
use wire_replica::decode_list;
use wire_store::BlockBitmap;

/// The answer to a list of written blocks.
pub(super) fn written_blocks(status: Status, data: Option<&[u8]>) -> Result<BlockBitmap, Status> {
    let Some(data) = data.filter(|_| status.is_success()) else {
        return Err(if status.is_success() { Status::INTERNAL_ERROR } else { status });
    };
    match decode_list::<BlockBitmap>(data) {
        Ok(Some((bitmaps, _))) if bitmaps.len() == 1 => Ok(bitmaps[0]),
        _ => {
            log::error!(
                "a node does not say which blocks are written: images with snapshots or a parent need nodes \
                 of this release"
            );
            Err(Status::INTERNAL_ERROR)
        }
    }
}

#[cfg(test)]
mod tests {
    use wire_replica::{Listing, encode_list};

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
