//! Placement of labels without overlap.

/// Moves positions (ascending, in pixels) apart to at least `gap` between neighbours, within `low..=high`, and
/// as close to the desired positions as possible.
pub(super) fn spread_labels(desired: &[f64], gap: f64, low: f64, high: f64) -> Vec<f64> {
    // If the labels do not fit, the gap shrinks.
    let gap = if desired.len() > 1 { gap.min((high - low) / (desired.len() - 1) as f64) } else { gap };
    // Adjacent labels form a block, which is centred on the mean of its desired positions.
    struct Block {
        first: usize,
        count: usize,
        sum: f64,
    }
    let mut blocks: Vec<Block> = Vec::new();
    let top = |block: &Block| {
        let height = gap * (block.count - 1) as f64;
        (block.sum / block.count as f64 - height / 2.0).clamp(low, (high - height).max(low))
    };
    for (index, position) in desired.iter().enumerate() {
        blocks.push(Block { first: index, count: 1, sum: *position });
        while let [.., before, last] = blocks.as_slice() {
            if top(before) + gap * before.count as f64 <= top(last) + 1e-9 {
                break;
            }
            let (count, sum) = (last.count, last.sum);
            blocks.pop();
            if let Some(before) = blocks.last_mut() {
                (before.count, before.sum) = (before.count + count, before.sum + sum);
            }
        }
    }
    let mut out = vec![0.0; desired.len()];
    for block in &blocks {
        for index in 0..block.count {
            out[block.first + index] = top(block) + gap * index as f64;
        }
    }
    out
}
