//! Clients of block stores of any kind, each with its own task, which runs whenever one of its operations is polled.

use farside_remote::Fabric;
use farside_remote::clock::Clock;
use farside_systems::blocks::{Blocks, BlocksError};
use farside_systems::registry::AnyBlocks;
use farside_systems::store::StoreError;
use farside_systems::system::Options;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

/// A client and its task.
pub(crate) struct Kept<F: Fabric + Clock> {
    fabric: F,
    blocks: AnyBlocks<F>,
    keeper: Keeper,
}

/// A client's task; `None` if it has ended.
struct Keeper(Option<Pin<Box<dyn Future<Output = ()>>>>);

impl Keeper {
    fn poll(&mut self, cx: &mut Context<'_>) {
        if self.0.as_mut().is_some_and(|keeper| keeper.as_mut().poll(cx).is_ready()) {
            self.0 = None;
        }
    }

    /// Runs the task until the future has ended.
    async fn during<O>(&mut self, future: impl Future<Output = O>) -> O {
        let mut future = pin!(future);
        poll_fn(|cx| {
            self.poll(cx);
            let polled = future.as_mut().poll(cx);
            // The operation may have begun a job.
            self.poll(cx);
            match polled {
                Poll::Pending => future.as_mut().poll(cx),
                ended => ended,
            }
        })
        .await
    }
}

impl<F: Fabric + Clock + Clone + 'static> Kept<F> {
    pub(crate) async fn open_in(
        fabric: F,
        nodes: u32,
        name: &str,
        entropy: u64,
    ) -> Result<Kept<F>, StoreError> {
        let options = Options { entropy, ..Options::default() };
        let blocks = AnyBlocks::open_in(fabric.clone(), nodes, name, &options).await?;
        let keeper = Keeper(Some(blocks.keeper()));
        Ok(Kept { fabric, blocks, keeper })
    }

    pub(crate) async fn write(&mut self, block: u64, bytes: &[u8]) -> Result<(), BlocksError> {
        // Boxed, since tests nest these futures several times, and a test's stack is small.
        self.keeper.during(Box::pin(self.blocks.write(block, bytes))).await
    }

    pub(crate) async fn read(&mut self, block: u64, into: &mut [u8]) -> Result<(), BlocksError> {
        self.keeper.during(Box::pin(self.blocks.read(block, into))).await
    }

    /// Runs the client's task for some time.
    pub(crate) async fn linger(&mut self, time: Duration) {
        self.keeper.during(self.fabric.sleep(time)).await;
    }
}

/// Runs a client's task until the future has ended.
pub(crate) async fn step<F: Fabric + Clock, O>(client: &mut Kept<F>, future: impl Future<Output = O>) -> O {
    client.keeper.during(future).await
}
