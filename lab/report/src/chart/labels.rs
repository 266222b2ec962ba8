//! Labels that do not cover each other.

/// Moves `wanted` (ascending) apart so that neighbours are at least `gap` away, inside `low..=high`, each
/// as near to its wish as that allows.
pub(super) fn spread(wanted: &[f64], gap: f64, low: f64, high: f64) -> Vec<f64> {
    // Where there are more than fit, closer is all that is left.
    let gap = if wanted.len() > 1 { gap.min((high - low) / (wanted.len() - 1) as f64) } else { gap };
    // Labels that touch form a block, which stands where its members' wishes average.
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
    for (index, wish) in wanted.iter().enumerate() {
        blocks.push(Block { first: index, count: 1, sum: *wish });
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
    let mut out = vec![0.0; wanted.len()];
    for block in &blocks {
        for index in 0..block.count {
            out[block.first + index] = top(block) + gap * index as f64;
        }
    }
    out
}
