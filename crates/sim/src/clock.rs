//! Clock of one process. The clock may run slow or fast and may jump ahead, but never goes back.

use crate::fault::{Fault, Struck, Target};
use crate::world::{Nanos, World, nanos};
use farside_remote::clock::Clock;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// Clock of a simulated process. The clock may run slow or fast and may jump ahead.
#[derive(Clone)]
pub struct ProcessClock(Rc<Inner>);

struct Inner {
    world: World,
    struck: Rc<Struck>,
    target: Target,
    /// Skew in ppm. A positive skew means that the clock runs faster than the world's.
    fast_ppm: i64,
    ahead: Cell<Nanos>,
}

impl ProcessClock {
    /// Creates a clock that runs `fast_ppm` parts per million faster than the world's, or slower if `fast_ppm` is
    /// negative. The clock's faults are counted as faults that strike `target`.
    ///
    /// # Panics
    /// If the clock would stand still or run backwards.
    pub fn new(world: &World, fast_ppm: i64, struck: &Rc<Struck>, target: Target) -> ProcessClock {
        assert!(fast_ppm > -1_000_000, "a clock runs forwards");
        ProcessClock(Rc::new(Inner {
            world: world.clone(),
            struck: Rc::clone(struck),
            target,
            fast_ppm,
            ahead: Cell::new(0),
        }))
    }

    /// Moves the clock ahead by `ns` nanoseconds. Counts one [`Fault::ClockJump`].
    pub fn jump(&self, ns: Nanos) {
        self.0.struck.count(Fault::ClockJump, self.0.target);
        self.0.ahead.set(self.0.ahead.get() + ns);
    }

    /// Converts a duration on this clock to a duration of the world, both in nanoseconds.
    fn stretched(&self, ns: Nanos) -> Nanos {
        if self.0.fast_ppm == 0 {
            return ns;
        }
        self.0.struck.count(Fault::ClockSkew, self.0.target);
        // Round up: otherwise a task that sleeps until an instant would wake just before this instant, again and again.
        (u128::from(ns) * 1_000_000).div_ceil((1_000_000 + self.0.fast_ppm).unsigned_abs().into()) as Nanos
    }
}

impl Clock for ProcessClock {
    fn now(&self) -> Duration {
        let now = i128::from(self.0.world.now());
        let skewed = now + now * i128::from(self.0.fast_ppm) / 1_000_000;
        Duration::from_nanos(skewed as u64 + self.0.ahead.get())
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.0.world.sleep(self.stretched(nanos(duration)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::{MILLIS, SECONDS};

    #[test]
    fn a_fast_clock_sleeps_less_and_a_jump_ends_no_sleep() {
        let world = World::new(1);
        let struck = Rc::default();
        let clock = ProcessClock::new(&world, 250_000, &struck, Target::None);
        let slept = clock.clone();
        world.complete(SECONDS, async move { slept.sleep(Duration::from_millis(10)).await });
        assert_eq!(world.now(), 8 * MILLIS);
        assert_eq!(clock.now(), Duration::from_millis(10));
        clock.jump(MILLIS);
        assert_eq!(clock.now(), Duration::from_millis(11));
        assert!(struck.of(Fault::ClockSkew) == 1 && struck.of(Fault::ClockJump) == 1);
    }
}
