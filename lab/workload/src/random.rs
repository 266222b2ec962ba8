//! Pseudo-random numbers for offsets, data and arrival times.

/// The wyrand generator: a counter mixed by one wide multiplication per number. Not cryptographically secure.
#[derive(Clone, Debug)]
pub struct WyRand(u64);

impl WyRand {
    /// Starts the sequence of `seed`.
    pub const fn new(seed: u64) -> WyRand {
        WyRand(seed)
    }

    /// The next 64 bits.
    #[inline]
    pub fn next_bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0xa076_1d64_78bd_642f);
        let wide = u128::from(self.0) * u128::from(self.0 ^ 0xe703_7ed1_a0b4_28db);
        (wide >> 64) as u64 ^ wide as u64
    }

    /// A number below `bound`, by multiply and shift. The bias is below `bound` in 2^64.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_bits()) * u128::from(bound)) >> 64) as u64
    }

    /// A number above 0 and at most 1.
    #[inline]
    pub fn fraction(&mut self) -> f64 {
        ((self.next_bits() >> 11) + 1) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// An exponentially distributed number with mean 1.
    #[inline]
    pub fn exponential(&mut self) -> f64 {
        -self.fraction().ln()
    }

    /// A normally distributed number with mean 0 and deviation 1 (Box-Muller transform).
    pub fn normal(&mut self) -> f64 {
        (2.0 * self.exponential()).sqrt() * (std::f64::consts::TAU * self.fraction()).cos()
    }
}

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

    #[test]
    fn numbers_below_a_bound_are_uniform() {
        let mut random = WyRand::new(1);
        let mut counts = [0u32; 10];
        for _ in 0..100_000 {
            counts[random.below(10) as usize] += 1;
        }
        assert!(counts.iter().all(|count| count.abs_diff(10_000) < 500), "{counts:?}");
    }

    #[test]
    fn equal_seeds_give_equal_sequences() {
        let draw = |seed| {
            let mut random = WyRand::new(seed);
            [random.next_bits(), random.next_bits()]
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }
}
