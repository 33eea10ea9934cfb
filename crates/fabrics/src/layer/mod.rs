//! Layers that wrap a fabric, so that neither protocols nor fabrics contain code to count or disturb requests.
//! [`count`], [`trace`] and [`delay`] wrap any fabric; [`fault`] wraps the carrier of a fabric's datagrams.

/// Implements `Turns` and `Clock` for a layer by forwarding to its field `inner`.
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

            fn wall(&self) -> std::time::Duration {
                self.inner.wall()
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
