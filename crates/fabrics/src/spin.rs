//! Looking for a short while before falling asleep: being woken takes tens of microseconds, and most answers less.
//!
//! Invariant: whoever looks lets others run now and then, since who is to answer may need this very core.

use crate::timer;
use std::time::Duration;

/// How long one looks: about what being woken costs.
pub const SPIN: Duration = Duration::from_micros(60);
/// How long one looks before one lets others run, if there are any.
pub const BREATH: Duration = Duration::from_micros(5);
/// How whoever waits for answers does it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waiting {
    /// Looks for [`SPIN`], then sleeps.
    #[default]
    Briefly,
    /// Looks once and sleeps: the least CPU time of its own, and a wake-up for every wait.
    Asleep,
    /// Looks all the time, and has a core for it: no wake-up at all.
    Awake,
}

/// Looks between two looks at the clock.
const LOOKS: u32 = 16;

/// Looks until something is found, or for [`SPIN`].
#[inline]
pub fn spin<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let mut since = None;
    let mut breathes_at = BREATH;
    loop {
        for _ in 0..LOOKS {
            if let Some(found) = look() {
                return Some(found);
            }
            std::hint::spin_loop();
        }
        let now = timer::now();
        let spun = now.saturating_sub(*since.get_or_insert(now));
        if spun >= SPIN {
            return None;
        }
        if spun >= breathes_at {
            std::thread::yield_now();
            breathes_at = spun + BREATH;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_looks_until_it_finds_or_gives_up() {
        let mut looks = 0;
        let found = spin(|| {
            looks += 1;
            (looks == 100).then_some(looks)
        });
        assert_eq!(found, Some(100));
        let began = timer::now();
        assert_eq!(spin(|| None::<()>), None);
        assert!(timer::now() - began >= SPIN);
    }
}
