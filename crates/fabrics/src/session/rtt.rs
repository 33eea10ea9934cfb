//! How long to wait for an answer before asking again (RFC 6298, with bounds for a data centre).
//!
//! Invariants: only what was sent once is measured (Karn's rule). What is lost makes nobody wait longer but the one
//! whose it was; only a path that is known to have become slow does.

use std::time::Duration;

/// The least time that is waited.
pub const RTO_MIN: Duration = Duration::from_millis(1);
/// The most.
pub const RTO_MAX: Duration = Duration::from_secs(1);
/// What is waited before anything was measured.
const RTO_INITIAL: Duration = Duration::from_millis(50);

/// An estimate of one path's round trip.
#[derive(Clone, Debug, Default)]
pub struct Rtt {
    /// The smoothed round trip and its variation in nanoseconds, once there was a sample.
    estimate: Option<(u64, u64)>,
    /// What answers that came too late have taught since the last sample.
    held: Duration,
    is_reliable: bool,
}

impl Rtt {
    /// Of a path that loses nothing: nobody need ever ask again.
    pub fn reliable() -> Rtt {
        Rtt { is_reliable: true, ..Rtt::default() }
    }

    /// Takes in how long the answer took to something that was sent once.
    #[inline]
    pub fn sample(&mut self, round_trip: Duration) {
        let round_trip = round_trip.min(RTO_MAX).as_nanos() as u64;
        self.estimate = Some(match self.estimate {
            None => (round_trip, round_trip / 2),
            Some((smoothed, variation)) => {
                ((smoothed * 7 + round_trip) / 8, (variation * 3 + smoothed.abs_diff(round_trip)) / 4)
            }
        });
        self.held = Duration::ZERO;
    }

    /// Notes that an answer, to whichever of several tries, took at least so long. Without this a path that became
    /// slow would never be measured again, since all that is sent on it would be sent twice.
    pub fn took_at_least(&mut self, round_trip: Duration) {
        self.held = self.held.max(round_trip.saturating_mul(2).min(RTO_MAX));
    }

    /// How long to wait for what is sent now, for the first time: for ever, on a reliable path.
    #[inline]
    pub fn rto(&self) -> Duration {
        if self.is_reliable {
            return Duration::MAX;
        }
        let of = |(smoothed, variation)| Duration::from_nanos(smoothed + variation * 4);
        let rto = self.estimate.map_or(RTO_INITIAL, of);
        rto.max(self.held).clamp(RTO_MIN, RTO_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_steady_path_is_waited_for_little_longer_than_it_takes() {
        let mut rtt = Rtt::default();
        (0..200).for_each(|_| rtt.sample(10 * MS));
        assert!(rtt.rto() >= 10 * MS && rtt.rto() < 11 * MS, "{:?}", rtt.rto());
        (0..200).for_each(|_| rtt.sample(Duration::from_micros(5)));
        assert_eq!(rtt.rto(), RTO_MIN);
        (0..200).for_each(|_| rtt.sample(60_000 * MS));
        assert_eq!(rtt.rto(), RTO_MAX);
    }

    #[test]
    fn what_came_too_late_lengthens_the_wait_of_all_until_a_sample() {
        let mut rtt = Rtt::default();
        rtt.sample(MS);
        let before = rtt.rto();
        (0..64).for_each(|_| rtt.took_at_least(before));
        assert_eq!(rtt.rto(), before * 2, "said often, it counts once");
        rtt.sample(MS);
        assert!(rtt.rto() < before);
    }
}
