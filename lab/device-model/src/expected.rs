//! Analytic latency of a single command on an idle device, without simulation.
//!
//! The distributions of the profile are convolved analytically. The difference from a simulation is the
//! error of the model's tables, random numbers and clock.

use crate::profile::DeviceProfile;
use crate::quantile::{MixtureComponent, quantile_us};

/// The latency distribution of one command on an idle device.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpectedLatency {
    /// Transfer time in microseconds.
    fixed_us: f64,
    /// Quantiles of the die's service time in microseconds.
    die_us: Vec<f64>,
    path: Vec<MixtureComponent>,
    mean_us: f64,
}

/// Number of quantiles of the die's distribution; the last one is subdivided into as many again.
const STEPS: usize = 512;

impl DeviceProfile {
    /// The latency of a read or a write of `bytes` on an idle device. `None` for commands larger than a
    /// page, whose parts can queue on one die.
    pub fn expected(&self, writes: bool, bytes: u32) -> Option<ExpectedLatency> {
        if bytes > self.device.page_bytes {
            return None;
        }
        let in_place = !self.is_buffered();
        let (die, path, mb_s) = if writes {
            (if in_place { &self.write.die_us[..] } else { &[] }, &self.write.path_us, self.front.write_mb_s)
        } else {
            (&self.read.die_us[..], &self.read.path_us, self.front.read_mb_s)
        };
        let fixed_us = f64::from(bytes) / mb_s;
        Some(ExpectedLatency {
            fixed_us,
            die_us: quantiles(die),
            path: path.clone(),
            mean_us: fixed_us + mean(die) + mean(path),
        })
    }
}

impl ExpectedLatency {
    /// Mean latency in microseconds.
    pub fn mean_us(&self) -> f64 {
        self.mean_us
    }

    /// The latency in microseconds that `percent` of the commands do not exceed.
    pub fn percentile_us(&self, percent: f64) -> f64 {
        let rank = percent / 100.0;
        quantile_us(rank, |us| {
            let share: f64 = self
                .die_us
                .iter()
                .enumerate()
                .map(|(step, die_us)| weight(step) * below(&self.path, us - self.fixed_us - die_us))
                .sum();
            share / (0..self.die_us.len()).map(weight).sum::<f64>()
        })
    }
}

/// Quantiles of a distribution at [`STEPS`] equal steps; the last step is subdivided into [`STEPS`].
fn quantiles(components: &[MixtureComponent]) -> Vec<f64> {
    if components.is_empty() {
        return vec![0.0];
    }
    let step = 1.0 / STEPS as f64;
    let body = (0..STEPS - 1).map(|index| (index as f64 + 0.5) * step);
    let tail = (0..STEPS).map(|index| 1.0 - step + (index as f64 + 0.5) * step * step);
    body.chain(tail).map(|rank| quantile_us(rank, |us| below(components, us))).collect()
}

fn weight(step: usize) -> f64 {
    let share = 1.0 / STEPS as f64;
    if step < STEPS - 1 { share } else { share * share }
}

fn below(components: &[MixtureComponent], us: f64) -> f64 {
    if components.is_empty() {
        return f64::from(u8::from(us >= 0.0));
    }
    let total: f64 = components.iter().map(|component| component.weight).sum();
    components.iter().map(|component| component.cdf(us) * component.weight).sum::<f64>() / total
}

fn mean(components: &[MixtureComponent]) -> f64 {
    let total: f64 = components.iter().map(|component| component.weight).sum();
    let component_mean =
        |c: &MixtureComponent| c.weight * (c.us * (c.sigma * c.sigma / 2.0).exp() + c.exp_us);
    components.iter().map(component_mean).sum::<f64>() / total.max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arrival, Load, MeasurementEnd, MediaState, Rw, SimulationConfig, simulate};

    #[test]
    fn the_sum_of_two_exponentials_matches_its_formula() {
        let part = |weight, us, exp_us| MixtureComponent { weight, us, sigma: 0.0, exp_us };
        // Two exponentials of mean 10: P(> t) = (1 + t / 10) exp(-t / 10).
        let expected = ExpectedLatency {
            fixed_us: 1.0,
            die_us: quantiles(&[part(1.0, 0.0, 10.0)]),
            path: vec![part(1.0, 0.0, 10.0)],
            mean_us: 21.0,
        };
        for percent in [50.0, 99.0, 99.9] {
            let t = expected.percentile_us(percent) - 1.0;
            let above = (1.0 + t / 10.0) * (-t / 10.0).exp();
            assert!((above / (1.0 - percent / 100.0) - 1.0).abs() < 0.01, "{percent}: {t} {above}");
        }
        assert!((mean(&[part(1.0, 5.0, 0.0), part(3.0, 1.0, 4.0)]) - 5.0).abs() < 1e-9);
    }

    /// The requirement is 5 %. Virtual time is deterministic, so the bound can be tighter.
    #[test]
    fn simulated_idle_latency_matches_the_analytic_one() {
        for name in DeviceProfile::shipped_names() {
            let profile = DeviceProfile::shipped(name).unwrap();
            let config = SimulationConfig {
                devices: 1,
                bytes: profile.capacity_bytes(),
                state: MediaState::Steady,
                ramp_ns: 0,
                end: MeasurementEnd::AfterCommands(400_000),
                seed: 5,
            };
            for rw in [Rw::RandRead, Rw::RandWrite] {
                if rw.writes() && profile.gc.is_some() {
                    // The buffer drains more slowly than sequential commands fill it.
                    continue;
                }
                let arrival = Arrival::Closed { depth: 1 };
                let load = Load { rw, bytes: 4096, arrival, host_ns: 0, wait_ns: 0 };
                let simulated = &simulate(&profile, &config, &[load])[0].latency;
                let expected = profile.expected(rw.writes(), 4096).unwrap();
                let pairs = [50.0, 99.0, 99.9]
                    .map(|percent| (simulated.percentile_ns(percent), expected.percentile_us(percent)));
                for (simulated_ns, expected_us) in
                    pairs.into_iter().chain([(simulated.mean_ns(), expected.mean_us())])
                {
                    let error = simulated_ns / 1000.0 / expected_us - 1.0;
                    assert!(error.abs() < 0.02, "{name} {rw:?}: {simulated_ns} ns for {expected_us} us");
                }
            }
        }
    }

    #[test]
    fn commands_larger_than_a_page_have_no_analytic_latency() {
        let profile = DeviceProfile::shipped("samsung-980-pro").unwrap();
        assert!(profile.expected(false, 4096).is_some());
        assert!(profile.expected(false, 8192).is_none());
    }
}
