//! What a request does to the parts of an object: pure decisions.

use std::ops::Range;

use store_image::TRANSFER_BYTES_MAX;
use wire_store::{BLOCK_BYTES, BlockBitmap};

use super::object::ParentData;

/// What is done with adjacent bytes of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// They are read from the head.
    Read,
    /// They are read from a parent.
    ReadParent(ParentPart),
    /// They are written to the head.
    Write,
    /// The head is zeroed there, and nothing below has anything.
    Zero,
    /// They are written to the head as zeroes: a parent has data there.
    WriteZeroes,
    /// Their block is read from a parent, and written to the head with these bytes changed: to data, or to
    /// zeroes if there is none.
    Merge(ParentPart),
}

/// A parent, and the offset in the object from which on it is not seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ParentPart {
    pub(super) volume: u64,
    pub(super) limit: u32,
}

/// A part of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// Offsets in the object, in bytes.
    pub(super) bytes: Range<u32>,
    pub(super) action: Action,
    /// Which piece of the request's data it has.
    pub(super) piece: Option<usize>,
}

const BLOCK: u32 = BLOCK_BYTES as u32;
/// Zeroes that are written at a time.
const WRITE_MAX: u32 = TRANSFER_BYTES_MAX;

/// Cuts a range into runs of blocks with the same action.
fn steps(bytes: Range<u32>, has_data: bool, action: impl Fn(usize, bool) -> Action) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut at = bytes.start;
    while at < bytes.end {
        let end = ((at / BLOCK + 1) * BLOCK).min(bytes.end);
        let action = action((at / BLOCK) as usize, end - at == BLOCK);
        let piece = has_data.then_some(steps.len());
        match steps.last_mut() {
            Some(last) if last.action == action && may_grow(last, end) => last.bytes.end = end,
            _ => steps.push(Step { bytes: at..end, action, piece }),
        }
        at = end;
    }
    steps
}

fn may_grow(step: &Step, end: u32) -> bool {
    match step.action {
        Action::Merge(_) => false,
        Action::WriteZeroes => end - step.bytes.start <= WRITE_MAX,
        _ => true,
    }
}

fn parent_part(parents: &ParentData, block: usize) -> ParentPart {
    let source = parents.source(block).expect("a parent has what is inherited");
    ParentPart { volume: source.volume, limit: source.limit }
}

/// Where the bytes of a read are.
pub(super) fn plan_read(bytes: Range<u32>, inherited: &BlockBitmap, parents: &ParentData) -> Vec<Step> {
    steps(bytes, true, |block, _| match inherited.has(block) {
        true => Action::ReadParent(parent_part(parents, block)),
        false => Action::Read,
    })
}

/// How data is written.
pub(super) fn plan_write(bytes: Range<u32>, inherited: &BlockBitmap, parents: &ParentData) -> Vec<Step> {
    steps(bytes, true, |block, is_whole| match inherited.has(block) && !is_whole {
        true => Action::Merge(parent_part(parents, block)),
        false => Action::Write,
    })
}

/// How bytes are zeroed.
pub(super) fn plan_zeroes(bytes: Range<u32>, inherited: &BlockBitmap, parents: &ParentData) -> Vec<Step> {
    steps(bytes, false, |block, is_whole| match (parents.blocks.has(block), is_whole) {
        (true, true) => Action::WriteZeroes,
        (true, false) if inherited.has(block) => Action::Merge(parent_part(parents, block)),
        // A part of a block that the head has: it stays written.
        (true, false) | (false, _) => Action::Zero,
    })
}

#[cfg(test)]
mod tests {
    use cluster_map::ParentVolume;

    use super::*;

    fn parents() -> ParentData {
        let parent = |volume| ParentVolume { volume, bytes: u64::MAX };
        ParentData::new(
            0,
            [(parent(1), BlockBitmap::of(1..3)), (parent(2), BlockBitmap::of(2..5))].into_iter(),
        )
    }

    fn part(volume: u64) -> ParentPart {
        ParentPart { volume, limit: 4 << 20 }
    }

    #[test]
    fn requests_are_cut_where_another_volume_has_the_data() {
        let (parents, inherited) = (parents(), BlockBitmap::of(2..5));
        let actions = |steps: Vec<Step>| {
            let of = |step: Step| (step.bytes.start / BLOCK, step.bytes.end.div_ceil(BLOCK), step.action);
            steps.into_iter().map(of).collect::<Vec<_>>()
        };
        let read = plan_read(512..6 * BLOCK, &inherited, &parents);
        let (first, second) = (Action::ReadParent(part(1)), Action::ReadParent(part(2)));
        let expected = [(0, 2, Action::Read), (2, 3, first), (3, 5, second), (5, 6, Action::Read)];
        assert_eq!(actions(read), expected);
        let write = plan_write(2 * BLOCK + 512..4 * BLOCK + 512, &inherited, &parents);
        let merges = [Action::Merge(part(1)), Action::Merge(part(2))];
        assert_eq!(actions(write), [(2, 3, merges[0]), (3, 4, Action::Write), (4, 5, merges[1])]);
        // Block 1 is in the head already, and would be the parent's again if it were given up.
        let zeroes = plan_zeroes(0..4 * BLOCK + 512, &inherited, &parents);
        assert_eq!(actions(zeroes), [(0, 1, Action::Zero), (1, 4, Action::WriteZeroes), (4, 5, merges[1])]);
        let partly = plan_zeroes(BLOCK + 512..2 * BLOCK, &inherited, &parents);
        assert_eq!(actions(partly), [(1, 2, Action::Zero)]);
    }

    #[test]
    fn zeroes_are_written_in_parts_of_one_request() {
        let parent = ParentVolume { volume: 1, bytes: u64::MAX };
        let all = ParentData::new(0, [(parent, BlockBitmap::of(0..1024))].into_iter());
        let steps = plan_zeroes(0..4 << 20, &BlockBitmap::default(), &all);
        assert_eq!(steps.len(), (4 << 20) / TRANSFER_BYTES_MAX as usize);
        assert!(
            steps.iter().all(|step| step.bytes.len() == TRANSFER_BYTES_MAX as usize && step.piece.is_none())
        );
    }
}
