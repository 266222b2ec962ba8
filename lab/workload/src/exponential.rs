//! Exponentially distributed numbers, for arrival times.

use random::WyRand;

/// Exponentially distributed numbers by the ziggurat method, mostly without a logarithm (G. Marsaglia and
/// W. Tsang, "The ziggurat method for generating random variables", 2000): the area under the density is cut
/// into layers of equal area.
#[derive(Clone, Debug)]
pub(crate) struct Exponential {
    /// Width of each layer, the lowest first; the lowest is widened so that its area includes the tail.
    widths: Box<[f64; LAYERS + 1]>,
}

const LAYERS: usize = 256;
/// Start of the tail and area of a layer, for 256 layers.
const TAIL: f64 = 7.697_117_470_131_05;
const AREA: f64 = 0.003_949_659_822_581_557;

impl Exponential {
    pub(crate) fn new() -> Exponential {
        let mut widths = Box::new([0.0f64; LAYERS + 1]);
        (widths[0], widths[1]) = (AREA / (-TAIL).exp(), TAIL);
        for layer in 2..LAYERS {
            let below: f64 = widths[layer - 1];
            widths[layer] = -((-below).exp() + AREA / below).ln();
        }
        Exponential { widths }
    }

    /// As [`WyRand::exponential`].
    #[inline]
    pub(crate) fn draw(&self, random: &mut WyRand) -> f64 {
        let bits = random.next_bits();
        let layer = bits as usize % LAYERS;
        // These bits are disjoint from those that select the layer.
        let drawn = (bits >> 11) as i64 as f64 * (1.0 / (1u64 << 53) as f64) * self.widths[layer];
        if drawn < self.widths[layer + 1] { drawn } else { self.draw_outside(random, layer, drawn) }
    }

    /// Samples outside of the part of a layer that lies entirely under the density.
    #[cold]
    fn draw_outside(&self, random: &mut WyRand, layer: usize, drawn: f64) -> f64 {
        if layer == 0 {
            // The tail is an exponential distribution again (memorylessness).
            return TAIL + random.exponential();
        }
        let (low, high) = ((-self.widths[layer]).exp(), (-self.widths[layer + 1]).exp());
        if low + random.fraction() * (high - low) < (-drawn).exp() { drawn } else { self.draw(random) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ziggurat_layers_have_equal_area() {
        let widths = Exponential::new().widths;
        assert!(widths.windows(2).all(|pair| pair[0] > pair[1]));
        for layer in 1..LAYERS {
            let height = (-widths[layer + 1]).exp() - (-widths[layer]).exp();
            assert!((height * widths[layer] / AREA - 1.0).abs() < 1e-6, "layer {layer}");
        }
        // The rectangle of the lowest layer and the tail have the area of a layer.
        assert!((TAIL * (-TAIL).exp() + (-TAIL).exp() - AREA).abs() < 1e-12);
    }

    #[test]
    fn exponential_numbers_follow_their_distribution() {
        let (table, mut random) = (Exponential::new(), WyRand::new(5));
        const COUNT: usize = 1_000_000;
        // Cells of width 1/64 up to 10, and one for the rest: the ziggurat's tail starts at 7.7.
        let mut cells = vec![0u64; 641];
        let (mut sum, mut squares) = (0.0, 0.0);
        for _ in 0..COUNT {
            let drawn = table.draw(&mut random);
            cells[((drawn * 64.0) as usize).min(640)] += 1;
            (sum, squares) = (sum + drawn, squares + drawn * drawn);
        }
        assert!((sum / COUNT as f64 - 1.0).abs() < 0.005 && (squares / COUNT as f64 - 2.0).abs() < 0.03);
        let mut statistic = 0.0;
        for (cell, count) in cells.iter().enumerate() {
            let beyond = |cell: usize| if cell > 640 { 0.0 } else { (-(cell as f64) / 64.0).exp() };
            let expected = (beyond(cell) - beyond(cell + 1)) * COUNT as f64;
            statistic += (*count as f64 - expected).powi(2) / expected;
        }
        // Five deviations above the mean: mean 641, deviation sqrt(2 * 641).
        assert!(statistic < 641.0 + 5.0 * (2.0 * 641.0f64).sqrt(), "{statistic}");
    }
}
