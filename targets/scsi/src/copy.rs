//! EXTENDED COPY within a unit and between units of a session, and RECEIVE COPY RESULTS.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use block_io::{Op, Tag};
use dma::Data;
use wire_scsi::copy::{
    COPY_STATUS, CopyLimits, CopyList, CopySegment, CopyState, CopyStatus, OPERATING_PARAMETERS,
    SEGMENT_BYTES, TARGET_BYTES, TARGET_IDENTIFICATION, target_designator,
};
use wire_scsi::inquiry::{Association, ProtocolId};
use wire_scsi::{AdditionalSense, Sense, SenseKey};

use crate::access::check_copy;
use crate::identity;
use crate::limits::{COPY_LIST_BYTES_MAX, COPY_SEGMENTS_MAX, COPY_TARGETS_MAX, REPEAT_BYTES_MAX};
use crate::nexus::{LastCopy, UnitNexus};
use crate::operation::{Answer, Operation, OperationContext, OperationEvent, Progress, bytes_of, result_of};
use crate::response::{Failure, check};
use crate::transfer::check_range;
use crate::unit::LogicalUnit;

/// Answers RECEIVE COPY RESULTS: the limits, and the outcome of the nexus's last copy.
pub(crate) fn results(nexus: &UnitNexus, action: u8, list: u8, allocation: u32) -> Result<Answer, Failure> {
    let unit = nexus.unit();
    if action == COPY_STATUS {
        let last = sync::lock(nexus.last_copy()).filter(|(identifier, _)| *identifier == list);
        let (_, status) = last.ok_or(check(Sense::invalid_field(2, None)))?;
        return Ok(Answer::data(status.encode().to_vec(), allocation));
    }
    if action != OPERATING_PARAMETERS {
        return Err(check(Sense::invalid_field(1, Some(4))));
    }
    let limits = CopyLimits {
        targets: COPY_TARGETS_MAX as u16,
        segments: COPY_SEGMENTS_MAX as u16,
        list_bytes: COPY_LIST_BYTES_MAX as u32,
        segment_bytes: u32::from(u16::MAX) * unit.block_bytes(),
    };
    Ok(Answer::data(limits.encode().to_vec(), allocation))
}

/// Copies segments, one after the other.
///
/// Within a unit, a segment is one request of the block layer. Between two, it is read and written piece after piece,
/// with the same memory.
#[derive(Debug)]
pub(crate) struct ExtendedCopy {
    parameter_bytes: u32,
    identifier: Option<u8>,
    segments: VecDeque<Segment>,
    /// For copies between units; in a request while one is in flight.
    memory: Option<Data>,
    status: CopyStatus,
    last: LastCopy,
}

/// A segment, or what is left of it.
#[derive(Debug)]
struct Segment {
    source: CopyTarget,
    destination: CopyTarget,
    source_lba: u64,
    destination_lba: u64,
    /// At least 1.
    blocks: u32,
}

/// A unit that is copied from or to.
#[derive(Clone, Debug)]
enum CopyTarget {
    /// The command's.
    Own,
    /// Another one of the session.
    Peer(Arc<UnitNexus>),
}

impl CopyTarget {
    fn nexus<'a>(&'a self, own: &'a UnitNexus) -> &'a UnitNexus {
        match self {
            CopyTarget::Own => own,
            CopyTarget::Peer(nexus) => nexus,
        }
    }

    /// Submits a request to the unit, if it may be read, or written.
    fn submit(
        &self,
        request: bdev::Request,
        is_written: bool,
        context: &mut OperationContext<'_>,
    ) -> Result<(), Failure> {
        self.report(check_copy(self.nexus(context.nexus), is_written))?;
        match self {
            CopyTarget::Own => context.submit(request),
            CopyTarget::Peer(nexus) => {
                // It was removed from the session.
                context.submit_to_peer(nexus, request).map_err(|_| aborted(UNREACHABLE))?;
            }
        }
        Ok(())
    }

    /// The failure that the command ends with.
    fn report(&self, result: Result<(), Failure>) -> Result<(), Failure> {
        result.map_err(|failure| match self {
            CopyTarget::Own => failure,
            CopyTarget::Peer(_) => aborted(AdditionalSense::THIRD_PARTY_DEVICE_FAILURE),
        })
    }
}

const UNREACHABLE: AdditionalSense = AdditionalSense::COPY_TARGET_UNREACHABLE;

fn aborted(additional: AdditionalSense) -> Failure {
    check(Sense::new(SenseKey::CopyAborted, additional))
}

impl Segment {
    fn is_within_a_unit(&self, own: &UnitNexus) -> bool {
        Arc::ptr_eq(self.source.nexus(own).unit(), self.destination.nexus(own).unit())
    }
}

impl ExtendedCopy {
    /// `parameter_bytes` is more than 0.
    pub(crate) fn new(parameter_bytes: u32) -> ExtendedCopy {
        ExtendedCopy {
            parameter_bytes,
            identifier: None,
            segments: VecDeque::new(),
            memory: None,
            status: CopyStatus::default(),
            last: LastCopy::default(),
        }
    }

    /// Publishes the status for RECEIVE COPY RESULTS.
    fn publish(&self) {
        *sync::lock(&self.last) = self.identifier.map(|identifier| (identifier, self.status));
    }

    fn end(&mut self, result: Result<(), Failure>) -> Progress {
        self.status.state = if result.is_ok() { CopyState::Complete } else { CopyState::Failed };
        self.publish();
        let data_out_bytes = self.parameter_bytes.into();
        Progress::Done(result.map(|()| Answer { data_out_bytes, ..Answer::good() }))
    }

    /// Submits what comes next, or ends.
    fn advance(&mut self, context: &mut OperationContext<'_>) -> Progress {
        self.publish();
        let Some(segment) = self.segments.front() else { return self.end(Ok(())) };
        let Segment { source_lba, destination_lba, blocks, .. } = *segment;
        let submitted = if segment.is_within_a_unit(context.nexus) {
            let request = bdev::Request::copy(Tag(0), source_lba, destination_lba, blocks);
            let readable = check_copy(segment.source.nexus(context.nexus), false);
            let readable = segment.source.report(readable);
            readable.and_then(|()| segment.destination.submit(request, true, context))
        } else {
            let block_bytes = segment.source.nexus(context.nexus).unit().block_bytes();
            let Some(mut memory) = self.memory.take() else {
                return Progress::Memory((REPEAT_BYTES_MAX / block_bytes).max(1) * block_bytes);
            };
            let bytes = (blocks as usize * block_bytes as usize).min(memory.len());
            if bytes < memory.len() {
                drop(memory.split_off(bytes));
            }
            let blocks = bytes as u32 / block_bytes;
            segment.source.submit(bdev::Request::read(Tag(0), source_lba, blocks, memory), false, context)
        };
        match submitted {
            Ok(()) => Progress::InFlight,
            Err(failure) => self.end(Err(failure)),
        }
    }

    fn completed(&mut self, completion: bdev::Completion, context: &mut OperationContext<'_>) -> Progress {
        let Some(segment) = self.segments.front_mut() else { return Progress::failed() };
        let (op, blocks) = (completion.request().op, completion.request().blocks);
        let target = if op == Op::Read { &segment.source } else { &segment.destination };
        if let Err(failure) = target.report(result_of(&completion)) {
            return self.end(Err(failure));
        }
        let memory = completion.into_data();
        if op == Op::Read {
            let Some(memory) = memory else { return Progress::failed() };
            let write = bdev::Request::write(Tag(0), segment.destination_lba, blocks, memory);
            return match segment.destination.submit(write, true, context) {
                Ok(()) => Progress::InFlight,
                Err(failure) => self.end(Err(failure)),
            };
        }
        let block_bytes = segment.destination.nexus(context.nexus).unit().block_bytes();
        self.status.bytes = self.status.bytes.saturating_add(blocks.saturating_mul(block_bytes));
        segment.source_lba += u64::from(blocks);
        segment.destination_lba += u64::from(blocks);
        segment.blocks -= blocks;
        if segment.blocks == 0 {
            self.status.segments += 1;
            self.segments.pop_front();
        } else {
            // A segment's last piece leaves less, and the next segment takes anew.
            self.memory = memory;
        }
        self.advance(context)
    }
}

impl Drop for ExtendedCopy {
    /// A copy that is aborted, or gets no memory, has failed.
    fn drop(&mut self) {
        let is_last = |last: &Option<(u8, CopyStatus)>| *last == self.identifier.map(|id| (id, self.status));
        if self.status.state == CopyState::Running && is_last(&sync::lock(&self.last)) {
            self.status.state = CopyState::Failed;
            self.publish();
        }
    }
}

/// The segments of a list, all of which are on units of the session. Nothing is copied if any is not.
fn segments(
    context: &OperationContext<'_>,
    bytes: &[u8],
) -> Result<(Option<u8>, VecDeque<Segment>), Failure> {
    let illegal = |additional| check(Sense::illegal(additional));
    let too_long = illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR);
    let list = CopyList::decode(bytes).map_err(|_| too_long)?;
    if list.targets.len() + list.segments.len() > COPY_LIST_BYTES_MAX {
        return Err(too_long);
    }
    if list.inline_bytes > 0 {
        return Err(check(Sense::invalid_parameter(12, None)));
    }
    let (targets, rest) = list.targets.as_chunks::<TARGET_BYTES>();
    if targets.len() > COPY_TARGETS_MAX {
        return Err(illegal(AdditionalSense::TOO_MANY_TARGET_DESCRIPTORS));
    }
    if !rest.is_empty() || targets.iter().any(|target| target[0] != TARGET_IDENTIFICATION) {
        return Err(illegal(AdditionalSense::UNSUPPORTED_TARGET_DESCRIPTOR));
    }
    let targets: Vec<_> = targets.iter().map(|target| find_target(context, target)).collect();
    // The type is first: descriptors of other types have other lengths.
    if list.segments.first().is_some_and(|kind| *kind != wire_scsi::copy::SEGMENT_BLOCKS) {
        return Err(illegal(AdditionalSense::UNSUPPORTED_SEGMENT_DESCRIPTOR));
    }
    let (descriptors, rest) = list.segments.as_chunks::<SEGMENT_BYTES>();
    if descriptors.len() > COPY_SEGMENTS_MAX {
        return Err(illegal(AdditionalSense::TOO_MANY_SEGMENT_DESCRIPTORS));
    }
    if !rest.is_empty() {
        return Err(illegal(AdditionalSense::UNSUPPORTED_SEGMENT_DESCRIPTOR));
    }
    let mut segments = VecDeque::with_capacity(descriptors.len());
    for descriptor in descriptors {
        let segment = CopySegment::decode(descriptor);
        let segment = segment.ok_or(illegal(AdditionalSense::UNSUPPORTED_SEGMENT_DESCRIPTOR))?;
        if let Some(segment) = plan(context.nexus, &segment, &targets)? {
            segments.push_back(segment);
        }
    }
    Ok((list.identifier, segments))
}

/// Checks a segment; `None` if it is empty.
fn plan(
    own: &UnitNexus,
    segment: &CopySegment,
    targets: &[Option<CopyTarget>],
) -> Result<Option<Segment>, Failure> {
    let target = |index: u16| targets.get(usize::from(index)).cloned().flatten().ok_or(aborted(UNREACHABLE));
    let (source, destination) = (target(segment.source)?, target(segment.destination)?);
    let (from, to) = (source.nexus(own), destination.nexus(own));
    if from.unit().block_bytes() != to.unit().block_bytes() {
        return Err(aborted(AdditionalSense::INCORRECT_COPY_TARGET_TYPE));
    }
    for (nexus, lba) in [(from, segment.source_lba), (to, segment.destination_lba)] {
        check_range(nexus.unit(), lba, segment.blocks.into()).map_err(|_| aborted(AdditionalSense::NONE))?;
    }
    source.report(check_copy(from, false))?;
    destination.report(check_copy(to, true))?;
    let CopySegment { source_lba, destination_lba, .. } = *segment;
    let blocks = u32::from(segment.blocks);
    Ok((blocks > 0).then_some(Segment { source, destination, source_lba, destination_lba, blocks }))
}

/// The unit that a target descriptor names: the command's own, or another one of the session. `None` also if it names
/// several: the part of a T10 designator for which a descriptor has room may be that of several units.
fn find_target(context: &OperationContext<'_>, target: &[u8; TARGET_BYTES]) -> Option<CopyTarget> {
    let own = Some(CopyTarget::Own).filter(|_| is_named(context.nexus.unit(), target));
    let peers = (0..).map_while(|index| context.peers.nexus(index));
    let peers = peers.filter(|nexus| is_named(nexus.unit(), target)).cloned().map(CopyTarget::Peer);
    let uuid = |found: &CopyTarget| found.nexus(context.nexus).unit().config().uuid;
    let mut all = own.into_iter().chain(peers);
    let first = all.next()?;
    // A device that is several units of the session is the same anywhere.
    all.all(|other| uuid(&other) == uuid(&first)).then_some(first)
}

/// Whether a target descriptor has one of the unit's designators.
fn is_named(unit: &LogicalUnit, target: &[u8; TARGET_BYTES]) -> bool {
    let Some((code_set, kind, identifier)) = target_designator(target) else { return false };
    let serial = identity::serial(unit);
    identity::unit_designators(unit, &serial).iter().any(|designator| {
        let mut own = Vec::new();
        designator.encode(Association::Unit, ProtocolId::None, &mut own);
        // A descriptor has room for 20 bytes of an identifier.
        let room = own[4..].len().min(20);
        (own[0] & 0xf, own[1] & 0x3f, &own[4..4 + room]) == (code_set, kind, identifier)
    })
}

impl Operation for ExtendedCopy {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::DataOut(data) => match segments(context, &bytes_of(&data)) {
                Ok((identifier, segments)) => {
                    (self.identifier, self.segments) = (identifier, segments);
                    self.last = context.nexus.last_copy().clone();
                    self.advance(context)
                }
                Err(failure) => Progress::Done(Err(failure)),
            },
            OperationEvent::Memory(memory) => {
                self.memory = Some(memory);
                self.advance(context)
            }
            OperationEvent::Completed(completion) => self.completed(completion, context),
            _ => Progress::parameters(self.parameter_bytes, context),
        }
    }
}
