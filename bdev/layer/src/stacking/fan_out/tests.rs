use std::sync::Arc;

use block_io::Op;
use reactor::{IdlePolicy, Reactor, ReactorConfig};

use super::*;
use crate::error::{FaultAction, FaultInjection};
use crate::stacking::{BaseBdev, BaseSet};
use crate::{BdevError, Registry, error, malloc};

/// Malloc devices `M0` and `M1` with error devices on them, which are the bases.
struct Bases {
    registry: Registry,
    reactor: Reactor,
    set: Arc<BaseSet>,
    channels: BaseChannels,
    fan_out: FanOut,
}

impl Bases {
    fn new() -> Bases {
        let registry = Registry::new();
        let reactor =
            Reactor::new(&ReactorConfig { idle: IdlePolicy::Spin, ..ReactorConfig::default() }).unwrap();
        let set = BaseSet::new(2);
        for place in 0..2 {
            malloc::create(&registry, malloc::MallocConfig::new(&format!("M{place}"), 64, 512)).unwrap();
            error::create(&registry, error::ErrorConfig::new(&format!("M{place}"))).unwrap();
            let base = BaseBdev::claim(&registry, &format!("EE_M{place}"), "test").unwrap();
            assert!(set.insert(place, base).is_ok());
        }
        let channels = set.open(&reactor.core()).unwrap();
        Bases { registry, reactor, set, channels, fan_out: FanOut::new(8, 4) }
    }

    fn data(&self, blocks: u32) -> Data {
        let mut buffer = self.reactor.core().pool().take(blocks as usize * 512).unwrap();
        for (index, block) in buffer.as_mut_slice().chunks_mut(512).enumerate() {
            block.fill(index as u8 + 1);
        }
        buffer.into()
    }

    /// Polls until bases that were removed are closed.
    fn result_of_nothing(&mut self) {
        self.channels.poll(&mut Vec::new());
        self.reactor.turn();
    }

    /// Polls until a request is whole.
    fn result(&mut self) -> FanOutResult {
        let mut sink = Vec::new();
        let mut result = None;
        for _ in 0..1000 {
            self.reactor.turn();
            self.channels.poll(&mut sink);
            for completion in sink.drain(..) {
                let done = self.fan_out.complete(completion, &mut self.channels);
                assert!(result.is_none() || done.is_none());
                result = result.or(done);
            }
        }
        assert!(self.fan_out.is_empty() && self.fan_out.children.is_empty());
        result.expect("it completes")
    }

    /// The first byte of each of the first blocks.
    fn read(&mut self, place: usize, blocks: u32) -> Vec<u8> {
        let request = Request::read(Tag(0), 0, blocks, self.data(blocks));
        self.fan_out.copy_to(request, 1 << place, &mut self.channels);
        let result = self.result();
        assert_eq!((result.status, result.succeeded), (Status::SUCCESS, 1 << place));
        let mut bytes = vec![0; blocks as usize * 512];
        result.request.data().unwrap().copy_to(0, &mut bytes);
        bytes.chunks(512).map(|block| block[0]).collect()
    }
}

#[test]
fn copies_reach_all_places_and_the_data_comes_back_as_it_was() {
    let mut bases = Bases::new();
    let whole = bases.data(4);
    let mut part = bases.data(8);
    let part = part.split_off(4 * 512);
    for (data, expected) in [(whole, [1, 2, 3, 4]), (part, [5, 6, 7, 8])] {
        let is_whole = data.single().unwrap().is_whole();
        let mut request = Request::write(Tag(77), 0, 4, data);
        request.flags |= RequestFlags::INTERNAL;
        bases.fan_out.copy_to(request, 0b11, &mut bases.channels);
        let result = bases.result();
        assert_eq!((result.status, result.succeeded, result.failed), (Status::SUCCESS, 0b11, 0));
        let request = result.complete().into_request();
        assert_eq!((request.tag, request.flags), (Tag(77), RequestFlags::INTERNAL));
        let buffer = request.data().unwrap().single().unwrap();
        assert!(buffer.is_writable(), "its next use may be a read");
        assert_eq!(buffer.is_whole(), is_whole);
        assert_eq!([bases.read(0, 4), bases.read(1, 4)], [expected, expected]);
    }
}

#[test]
fn pieces_go_to_their_places_and_the_data_is_joined_again() {
    let mut bases = Bases::new();
    let piece = |place, lba, blocks| Piece { place, lba, blocks };
    let pieces = [piece(0, 0, 1), piece(1, 0, 2), piece(0, 1, 1), piece(1, 2, 1)];
    for op in [Op::Write, Op::Read] {
        let mut request = Request::new(Tag(5), op, 10, 5);
        let mut data = bases.data(5);
        if op == Op::Read {
            data.clear();
        }
        request.set_data(Some(data));
        bases.fan_out.divide(request, &pieces, &mut bases.channels).unwrap();
        let result = bases.result();
        assert_eq!((result.status, result.succeeded), (Status::SUCCESS, 0b11));
        let request = result.request;
        assert_eq!((request.tag, request.lba, request.blocks), (Tag(5), 10, 5));
        let buffer = request.data().unwrap().single().expect("neighbours are one slice again");
        assert!(buffer.is_whole());
        let blocks: Vec<u8> = buffer.as_slice().chunks(512).map(|block| block[511]).collect();
        assert_eq!(blocks, [1, 2, 3, 4, 5], "{op:?}");
    }
    assert_eq!((bases.read(0, 3), bases.read(1, 4)), (vec![1, 4, 0], vec![2, 3, 5, 0]));
    let unmap = Request::new(Tag(0), Op::Unmap, 0, 5);
    bases.fan_out.divide(unmap, &pieces, &mut bases.channels).unwrap();
    assert!(bases.result().status.is_success());
    assert_eq!((bases.read(0, 3), bases.read(1, 4)), (vec![0; 3], vec![0; 4]));
    let copy = Request::copy(Tag(1), 0, 5, 5);
    assert!(bases.fan_out.divide(copy, &pieces, &mut bases.channels).is_err());
}

#[test]
fn the_result_says_which_places_failed_and_a_retry_remembers_it() {
    let mut bases = Bases::new();
    let fail = FaultInjection::once(None, FaultAction::Fail(Status::WRITE_FAULT));
    error::inject(&bases.registry, "EE_M0", fail.clone()).unwrap();
    let request = Request::write(Tag(0), 0, 1, bases.data(1));
    bases.fan_out.copy_to(request, 0b11, &mut bases.channels);
    let result = bases.result();
    assert_eq!((result.succeeded, result.failed), (0b10, 0b01));
    assert_eq!(result.complete().status(), Status::WRITE_FAULT);

    error::inject(&bases.registry, "EE_M0", fail).unwrap();
    let request = Request::read(Tag(0), 0, 1, bases.data(1));
    bases.fan_out.copy_to(request, 0b01, &mut bases.channels);
    let result = bases.result();
    assert_eq!((result.status, result.failed), (Status::WRITE_FAULT, 0b01));
    bases.fan_out.retry(result, 0b10, &mut bases.channels);
    let result = bases.result();
    assert_eq!((result.status, result.succeeded, result.failed), (Status::SUCCESS, 0b10, 0b01));
    assert_eq!(result.request.data().unwrap().single().unwrap().as_slice()[0], 1);
}

#[test]
fn a_base_that_leaves_is_closed_after_its_last_io_and_one_that_comes_is_opened() {
    let mut bases = Bases::new();
    let pending = FaultInjection::once(None, FaultAction::Pending);
    error::inject(&bases.registry, "EE_M0", pending).unwrap();
    let request = Request::read(Tag(9), 0, 1, bases.data(1));
    bases.fan_out.copy_to(request, 0b01, &mut bases.channels);
    bases.channels.submit();
    let device = bases.registry.find("EE_M0").unwrap();
    assert!(bases.set.place_of(&device) == Some(0) && bases.channels.deadline() != Some(0));
    bases.set.remove(0).unwrap();
    assert_eq!(bases.channels.deadline(), Some(0), "the channel is to be polled");
    bases.channels.sync();
    assert_eq!((bases.channels.present(), device.open_count()), (0b10, 1));
    error::resume_pending(&bases.registry, "EE_M0").unwrap();
    let result = bases.result();
    assert_eq!((result.request.tag, result.status), (Tag(9), Status::SUCCESS));
    assert_eq!(device.open_count(), 0);
    // A place without a base is a path that is down.
    let request = Request::read(Tag(9), 0, 1, bases.data(1));
    bases.fan_out.copy_to(request, 0b01, &mut bases.channels);
    assert_eq!(bases.result().status, Status::INTERNAL_PATH_ERROR);
    let base = || BaseBdev::claim(&bases.registry, "EE_M0", "test");
    assert!(bases.set.insert(0, base().unwrap()).is_ok());
    assert!(matches!(base(), Err(BdevError::Claimed { .. })));
    assert_eq!(bases.read(0, 1), [0]);
    assert_eq!(bases.channels.present(), 0b11);
}

#[test]
fn a_forwarded_request_returns_as_it_was_from_its_block_of_the_place_and_can_be_retried() {
    let mut bases = Bases::new();
    let base = bases.set.remove(1).unwrap();
    let name = base.device().name().to_string();
    bases.result_of_nothing();
    let base = BaseBdev::claim(&bases.registry, &name, "test").unwrap().with_first_lba(16);
    assert!(bases.set.insert(1, base).is_ok());
    let fault = FaultInjection::once(Some(Op::Write), FaultAction::Fail(Status::WRITE_FAULT));
    error::inject(&bases.registry, &name, fault).unwrap();
    let mut request = Request::write(Tag(77), 40, 2, bases.data(2));
    request.flags = RequestFlags::FUA;
    bases.fan_out.forward(request, 1, 4, &mut bases.channels);
    assert_eq!(bases.fan_out.len(), 1);
    let result = bases.result();
    assert_eq!((result.status, result.succeeded, result.failed), (Status::WRITE_FAULT, 0, 2));
    assert_eq!((result.request.tag, result.request.lba), (Tag(77), 40));
    assert_eq!(result.request.flags, RequestFlags::FUA);
    bases.fan_out.forward(result.request, 1, 4, &mut bases.channels);
    let result = bases.result();
    assert!(result.status.is_success());
    // Another reader of the base sees where it was written.
    let mut read = Request::read(Tag(1), 20, 2, bases.data(2));
    read.data_mut().unwrap().clear();
    bases.fan_out.copy_to(Request { lba: 4, ..read }, 2, &mut bases.channels);
    let read = bases.result();
    assert_eq!(read.request.data().unwrap().single().unwrap().as_slice()[512], 2);
}
