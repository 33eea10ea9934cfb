//! Layers that wrap any other: protocols stay clean, and so do fabrics. [`count`], [`trace`] and [`delay`] wrap a
//! fabric, [`fault`] what carries a fabric's datagrams.

/// A layer ends turns, waits, and tells the time as the fabric in its field `inner` does.
macro_rules! turns_and_time_of_inner {
    ($layer:ident<F $(, $other:ident)*>) => {
        impl<F: $crate::executor::Turns $(, $other)*> $crate::executor::Turns for $layer<F $(, $other)*> {
            fn end_turn(&self) {
                self.inner.end_turn();
            }

            fn wait(&self, core: &$crate::executor::Idle<'_>) {
                self.inner.wait(core);
            }
        }

        impl<F: farside_remote::clock::Clock $(, $other)*> farside_remote::clock::Clock for $layer<F $(, $other)*> {
            fn now(&self) -> std::time::Duration {
                self.inner.now()
            }

            fn sleep(&self, duration: std::time::Duration) -> impl Future<Output = ()> {
                self.inner.sleep(duration)
            }
        }
    };
}

pub mod count;
pub mod delay;
pub mod fault;
pub mod trace;

use std::time::Duration;

/// Chance by a seed (splitmix64): the same seed, the same story.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// At least 0, less than 1.
    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Whether something so likely happens.
    fn is(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.share() < probability
    }

    /// A time between nothing and `most`.
    fn up_to(&mut self, most: Duration) -> Duration {
        most.mul_f64(self.share())
    }
}
