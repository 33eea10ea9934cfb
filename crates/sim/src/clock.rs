//! Clocks of one process. Its monotonic clock may run slow or fast and may jump ahead, but never goes back. Its wall
//! clock runs at the same rate. It may be wrong by any amount, and may jump forwards and back.

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
    /// Offset of the wall clock in nanoseconds, beyond [`WALL_AT_START`].
    wall: Cell<i64>,
}

/// Correct time at the start of a world, since the Unix epoch.
const WALL_AT_START: Duration = Duration::from_secs(1_700_000_000);

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
            wall: Cell::new(0),
        }))
    }

    /// Creates a clock that shows the world's time, and that no fault strikes.
    pub fn of_world(world: &World) -> ProcessClock {
        ProcessClock::new(world, 0, &Rc::default(), Target::None)
    }

    /// Moves the clock ahead by `ns` nanoseconds. Counts one [`Fault::ClockJump`].
    pub fn jump(&self, ns: Nanos) {
        self.0.struck.count(Fault::ClockJump, self.0.target);
        self.0.ahead.set(self.0.ahead.get() + ns);
    }

    /// Lets the wall clock jump by `ns` nanoseconds, forwards or back.
    pub fn jump_wall(&self, ns: i64) {
        self.0.wall.set(self.0.wall.get().saturating_add(ns));
    }

    /// The time by this process's oscillator, without jumps.
    fn skewed(&self) -> u64 {
        let now = i128::from(self.0.world.now());
        (now + now * i128::from(self.0.fast_ppm) / 1_000_000) as u64
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
        Duration::from_nanos(self.skewed() + self.0.ahead.get())
    }

    fn wall(&self) -> Duration {
        let unjumped = WALL_AT_START + Duration::from_nanos(self.skewed());
        match u64::try_from(self.0.wall.get()) {
            Ok(ahead) => unjumped + Duration::from_nanos(ahead),
            Err(_) => unjumped.saturating_sub(Duration::from_nanos(self.0.wall.get().unsigned_abs())),
        }
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
        assert_eq!(clock.wall(), WALL_AT_START + Duration::from_millis(10));
        clock.jump_wall(-3 * MILLIS as i64);
        assert_eq!(clock.wall(), WALL_AT_START + Duration::from_millis(7));
        clock.jump_wall(i64::MIN);
        assert_eq!((clock.wall(), clock.now()), (Duration::ZERO, Duration::from_millis(11)));
        assert!(struck.of(Fault::ClockSkew) == 1 && struck.of(Fault::ClockJump) == 1);
    }
}
