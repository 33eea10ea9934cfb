//! Retransmission timeout (RFC 6298, with bounds for a data centre).
//!
//! Invariant: only responses to data sent exactly once are measured (Karn's rule).
//! Invariant: a loss lengthens only the timeout of the lost request. The timeouts of all requests become longer only if
//! measurements show that the path has become slow.

use std::time::Duration;

/// Minimum timeout of a retransmission.
pub const RTO_MIN: Duration = Duration::from_millis(1);
/// Maximum timeout.
pub const RTO_MAX: Duration = Duration::from_secs(1);
/// Timeout before the first sample.
const RTO_INITIAL: Duration = Duration::from_millis(50);

/// Estimate of a path's round-trip time.
#[derive(Clone, Debug, Default)]
pub struct Rtt {
    /// Smoothed round trip and its variation in nanoseconds, after the first sample.
    estimate: Option<(u64, u64)>,
    /// Minimum timeout until the next sample. Responses that came after their timeout have set it.
    held: Duration,
    is_reliable: bool,
}

impl Rtt {
    /// Creates the estimate of a reliable path, on which nothing is ever retransmitted.
    pub fn reliable() -> Rtt {
        Rtt { is_reliable: true, ..Rtt::default() }
    }

    /// Records the round trip of data that was sent once.
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

    /// Records a lower bound of the round trip, from a response to data that was sent several times. Which of these
    /// transmissions it answers is unknown. Without the bound, the timeout of a path that has become slow would always
    /// expire before the response. Then everything would be sent twice, and data sent twice is never measured.
    pub fn took_at_least(&mut self, round_trip: Duration) {
        self.held = self.held.max(round_trip.saturating_mul(2).min(RTO_MAX));
    }

    /// Returns the timeout of a first transmission. [`Duration::MAX`] on a reliable path.
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
    fn the_timeout_of_a_steady_path_is_close_to_its_round_trip() {
        let mut rtt = Rtt::default();
        (0..200).for_each(|_| rtt.sample(10 * MS));
        assert!(rtt.rto() >= 10 * MS && rtt.rto() < 11 * MS, "{:?}", rtt.rto());
        (0..200).for_each(|_| rtt.sample(Duration::from_micros(5)));
        assert_eq!(rtt.rto(), RTO_MIN);
        (0..200).for_each(|_| rtt.sample(60_000 * MS));
        assert_eq!(rtt.rto(), RTO_MAX);
    }

    #[test]
    fn a_late_response_lengthens_all_timeouts_until_a_sample() {
        let mut rtt = Rtt::default();
        rtt.sample(MS);
        let before = rtt.rto();
        (0..64).for_each(|_| rtt.took_at_least(before));
        assert_eq!(rtt.rto(), before * 2, "repeated reports count once");
        rtt.sample(MS);
        assert!(rtt.rto() < before);
    }
}
