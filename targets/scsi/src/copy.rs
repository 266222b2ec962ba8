//! EXTENDED COPY within a unit, and RECEIVE COPY RESULTS.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use block_io::Tag;
use wire_scsi::copy::{
    COPY_STATUS, CopyLimits, CopyList, CopySegment, CopyStatus, OPERATING_PARAMETERS, SEGMENT_BYTES,
    TARGET_BYTES, TARGET_IDENTIFICATION, target_designator,
};
use wire_scsi::inquiry::{Association, ProtocolId};
use wire_scsi::{AdditionalSense, Sense, SenseKey};

use crate::identity;
use crate::limits::{COPY_LIST_BYTES_MAX, COPY_SEGMENTS_MAX, COPY_TARGETS_MAX};
use crate::nexus::UnitNexus;
use crate::operation::{Answer, Operation, OperationContext, OperationEvent, Progress, bytes_of, result_of};
use crate::response::{Failure, check};
use crate::transfer::check_range;
use crate::unit::LogicalUnit;

/// Answers RECEIVE COPY RESULTS: the limits, and the outcome of the nexus's last copy.
pub(crate) fn results(nexus: &UnitNexus, action: u8, list: u8, allocation: u32) -> Result<Answer, Failure> {
    let unit = nexus.unit();
    if action == COPY_STATUS {
        let status = nexus.copy_status(list).ok_or(check(Sense::invalid_field(2, None)))?;
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
#[derive(Debug)]
pub(crate) struct ExtendedCopy {
    parameter_bytes: u32,
    identifier: Option<u8>,
    segments: VecDeque<CopySegment>,
    status: CopyStatus,
}

fn aborted(additional: AdditionalSense) -> Failure {
    check(Sense::new(SenseKey::CopyAborted, additional))
}

impl ExtendedCopy {
    /// `parameter_bytes` is more than 0.
    pub(crate) fn new(parameter_bytes: u32) -> ExtendedCopy {
        ExtendedCopy {
            parameter_bytes,
            identifier: None,
            segments: VecDeque::new(),
            status: CopyStatus::default(),
        }
    }

    /// Submits the next segment, if there is one.
    fn submit(&mut self, context: &mut OperationContext<'_>) -> Progress {
        let Some(segment) = self.segments.pop_front() else {
            context.nexus.set_copy_status(self.identifier, self.status);
            let data_out_bytes = self.parameter_bytes.into();
            return Progress::Done(Ok(Answer { data_out_bytes, ..Answer::good() }));
        };
        let CopySegment { source_lba, destination_lba, blocks, .. } = segment;
        context.submit(bdev::Request::copy(Tag(0), source_lba, destination_lba, blocks.into()));
        Progress::InFlight
    }
}

/// The segments of a list, all of which are within the unit. Nothing is copied if any is not.
fn segments(unit: &LogicalUnit, bytes: &[u8]) -> Result<(Option<u8>, VecDeque<CopySegment>), Failure> {
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
    let own = own_targets(unit, targets);
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
        for index in [segment.source, segment.destination] {
            if !own.get(usize::from(index)).is_some_and(|is_own| *is_own) {
                return Err(aborted(AdditionalSense::COPY_TARGET_UNREACHABLE));
            }
        }
        for lba in [segment.source_lba, segment.destination_lba] {
            check_range(unit, lba, segment.blocks.into()).map_err(|_| aborted(AdditionalSense::NONE))?;
        }
        if segment.blocks > 0 {
            segments.push_back(segment);
        }
    }
    Ok((list.identifier, segments))
}

/// Which targets are this unit: they have one of its designators.
fn own_targets(unit: &LogicalUnit, targets: &[[u8; TARGET_BYTES]]) -> Vec<bool> {
    let serial = identity::serial(unit);
    let mut own = Vec::new();
    for designator in identity::unit_designators(unit, &serial) {
        let mut bytes = Vec::new();
        designator.encode(Association::Unit, ProtocolId::None, &mut bytes);
        own.push(bytes);
    }
    let is_own = |target: &[u8; TARGET_BYTES]| {
        target_designator(target).is_some_and(|(code_set, kind, identifier)| {
            own.iter().any(|own| {
                // A descriptor has room for 20 bytes of an identifier.
                let room = own[4..].len().min(20);
                (own[0] & 0xf, own[1] & 0x3f, &own[4..4 + room]) == (code_set, kind, identifier)
            })
        })
    };
    targets.iter().map(is_own).collect()
}

impl Operation for ExtendedCopy {
    fn resume(&mut self, event: OperationEvent, context: &mut OperationContext<'_>) -> Progress {
        match event {
            OperationEvent::DataOut(data) => match segments(context.nexus.unit(), &bytes_of(&data)) {
                Ok((identifier, segments)) => {
                    (self.identifier, self.segments) = (identifier, segments);
                    self.submit(context)
                }
                Err(failure) => Progress::Done(Err(failure)),
            },
            OperationEvent::Completed(completion) => match result_of(&completion) {
                Ok(()) => {
                    let blocks = completion.request().blocks;
                    self.status.segments += 1;
                    self.status.bytes += blocks * context.nexus.unit().block_bytes();
                    self.submit(context)
                }
                Err(failure) => {
                    self.status.has_failed = true;
                    context.nexus.set_copy_status(self.identifier, self.status);
                    Progress::Done(Err(failure))
                }
            },
            _ => Progress::parameters(self.parameter_bytes, context),
        }
    }
}
