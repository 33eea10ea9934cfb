//! The clock of one process: it may run slow or fast, and jump ahead. It never goes back.

use crate::fault::{Fault, Struck, Whom};
use crate::world::{Nanos, World, nanos};
use farside_remote::clock::Clock;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// A process's clock.
#[derive(Clone)]
pub struct ProcessClock(Rc<Inner>);

struct Inner {
    world: World,
    struck: Rc<Struck>,
    whom: Whom,
    /// How much faster than the world's, in parts per million.
    fast_ppm: i64,
    ahead: Cell<Nanos>,
}

impl ProcessClock {
    /// A clock that runs so many millionths faster than the world's, or slower if that is negative. What is wrong with
    /// it strikes `whom`.
    ///
    /// # Panics
    /// If it would go back.
    pub fn new(world: &World, fast_ppm: i64, struck: &Rc<Struck>, whom: Whom) -> ProcessClock {
        assert!(fast_ppm > -1_000_000, "a clock goes on");
        ProcessClock(Rc::new(Inner {
            world: world.clone(),
            struck: Rc::clone(struck),
            whom,
            fast_ppm,
            ahead: Cell::new(0),
        }))
    }

    /// It is later at once.
    pub fn jump(&self, ns: Nanos) {
        self.0.struck.count(Fault::ClockJump, self.0.whom);
        self.0.ahead.set(self.0.ahead.get() + ns);
    }

    /// In the world's time, how long this clock takes for so long.
    fn stretched(&self, ns: Nanos) -> Nanos {
        if self.0.fast_ppm == 0 {
            return ns;
        }
        self.0.struck.count(Fault::ClockSkew, self.0.whom);
        // Rounded up, or whoever waits for an instant would look for ever just before it.
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
    fn a_fast_clock_sleeps_less_and_a_jump_is_no_sleep() {
        let world = World::new(1);
        let struck = Rc::default();
        let clock = ProcessClock::new(&world, 250_000, &struck, Whom::Nobody);
        let slept = clock.clone();
        world.complete(SECONDS, async move { slept.sleep(Duration::from_millis(10)).await });
        assert_eq!(world.now(), 8 * MILLIS);
        assert_eq!(clock.now(), Duration::from_millis(10));
        clock.jump(MILLIS);
        assert_eq!(clock.now(), Duration::from_millis(11));
        assert!(struck.of(Fault::ClockSkew) == 1 && struck.of(Fault::ClockJump) == 1);
    }
}
