//! A client for ordinary programs: any thread or task may use it, and a thread of its own runs the operations.
//!
//! Invariant: an operation that was handed over is answered, even if the thread ends: then by [`Error::Closed`].
//! Invariant: where the session is over, another is opened when something is asked.

mod pending;

pub use pending::Pending;

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::pool::Pool;
use crate::reopen::{Opened, is_over, may_try_again, not_opened};
use farside_fabrics::executor::{Core, block_on};
use farside_systems::kv::{Conflict, Item, Kv, KvError, Version};
use farside_systems::registry::AnyKv;
use farside_systems::system::Options;
use pending::{Promise, promise};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// A value with its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// Its bytes.
    pub value: Vec<u8>,
    /// Which install this was: for [`Client::compare_and_put`].
    pub version: Version,
}

/// Operations under way at once; more wait in line.
const TASKS: usize = 32;

/// A client of one store. Cheap to clone; the last clone to go ends its thread, once all that was asked is done.
#[derive(Clone)]
pub struct Client {
    queue: Arc<Handle>,
}

impl Client {
    pub(crate) fn start(pool: Pool, name: &str) -> Result<Client, Error> {
        let queue = Arc::new(Queue::default());
        let theirs = Arc::clone(&queue);
        let name = name.to_owned();
        let (ready, opened) = mpsc::channel();
        std::thread::Builder::new()
            .name("farside-client".into())
            .spawn(move || run(&pool, &name, &theirs, &ready))
            .map_err(Error::Thread)?;
        opened.recv().unwrap_or(Err(Error::Closed))?;
        Ok(Client { queue: Arc::new(Handle(queue)) })
    }

    /// The value of `key`.
    pub fn get(&self, key: impl Into<Vec<u8>>) -> Pending<Option<Value>> {
        let key = key.into();
        self.ask(|done| Request::Get { key, done })
    }

    /// Gives `key` a value.
    pub fn put(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Pending<()> {
        let (key, value) = (key.into(), value.into());
        self.ask(|done| Request::Put { key, value, done })
    }

    /// Takes the value of `key` away; answers whether it had one.
    pub fn delete(&self, key: impl Into<Vec<u8>>) -> Pending<bool> {
        let key = key.into();
        self.ask(|done| Request::Delete { key, done })
    }

    /// Gives `key` a value if it has none; answers whether it did.
    pub fn put_if_absent(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Pending<bool> {
        let (key, value) = (key.into(), value.into());
        self.ask(|done| Request::PutIfAbsent { key, value, done })
    }

    /// Gives `key` another value if it still has the version that a [`Client::get`] answered; answers the new one.
    pub fn compare_and_put(
        &self,
        key: impl Into<Vec<u8>>,
        expected: Version,
        value: impl Into<Vec<u8>>,
    ) -> Pending<Result<Version, Conflict>> {
        let (key, value) = (key.into(), value.into());
        self.ask(|done| Request::CompareAndPut { key, expected, value, done })
    }

    /// The values of several keys, in the order of the keys, each as it was at an instant of its own: one operation in
    /// line, with one round trip for up to 64 keys whose values fit into one reply (64 KiB). For PRISM-KV stores alone.
    pub fn get_many<K: Into<Vec<u8>>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Pending<Vec<Option<Value>>> {
        let keys = keys.into_iter().map(Into::into).collect();
        self.ask(|done| Request::GetMany { keys, done })
    }

    /// Gives several keys values: one operation in line, with two round trips for as many keys as fit into one chain
    /// (16 keys, 56 KiB). Each is a put of its own, without order between keys; of a key that comes twice, the later
    /// value stays. After an error of which [`Error::ran`] is [`Ran::No`](crate::Ran::No), none was stored; after any
    /// other, any may have been. For PRISM-KV stores alone.
    pub fn put_many<K: Into<Vec<u8>>, V: Into<Vec<u8>>>(
        &self,
        items: impl IntoIterator<Item = (K, V)>,
    ) -> Pending<()> {
        let items = items.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
        self.ask(|done| Request::PutMany { items, done })
    }

    fn ask<T>(&self, request: impl FnOnce(Promise<T>) -> Request) -> Pending<T> {
        let (done, pending) = promise();
        self.queue.0.push(request(done));
        pending
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

/// What clones share: when the last goes, the queue closes.
struct Handle(Arc<Queue>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close();
    }
}

enum Request {
    Get {
        key: Vec<u8>,
        done: Promise<Option<Value>>,
    },
    Put {
        key: Vec<u8>,
        value: Vec<u8>,
        done: Promise<()>,
    },
    Delete {
        key: Vec<u8>,
        done: Promise<bool>,
    },
    PutIfAbsent {
        key: Vec<u8>,
        value: Vec<u8>,
        done: Promise<bool>,
    },
    CompareAndPut {
        key: Vec<u8>,
        expected: Version,
        value: Vec<u8>,
        done: Promise<Result<Version, Conflict>>,
    },
    GetMany {
        keys: Vec<Vec<u8>>,
        done: Promise<Vec<Option<Value>>>,
    },
    PutMany {
        items: Vec<(Vec<u8>, Vec<u8>)>,
        done: Promise<()>,
    },
}

/// What was asked and not yet begun.
#[derive(Default)]
struct Queue {
    inner: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    requests: VecDeque<Request>,
    /// Tasks with nothing to do.
    idle: Vec<Waker>,
    closed: bool,
}

impl Queue {
    fn inner(&self) -> MutexGuard<'_, Waiting> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request to a queue that is closed is dropped, which answers it.
    fn push(&self, request: Request) {
        let mut inner = self.inner();
        if !inner.closed {
            inner.requests.push_back(request);
            let idle = inner.idle.pop();
            drop(inner);
            idle.into_iter().for_each(Waker::wake);
        }
    }

    fn close(&self) {
        let mut inner = self.inner();
        inner.closed = true;
        let idle = std::mem::take(&mut inner.idle);
        drop(inner);
        idle.into_iter().for_each(Waker::wake);
    }

    fn take_all(&self) -> VecDeque<Request> {
        std::mem::take(&mut self.inner().requests)
    }

    /// Whoever waits for a request looks whether there is to be one.
    fn wake_idle(&self) {
        let idle = std::mem::take(&mut self.inner().idle);
        idle.into_iter().for_each(Waker::wake);
    }

    /// The next request; nothing once the queue is closed and empty, or `ends`.
    async fn pop(&self, ends: &Cell<bool>) -> Option<Request> {
        std::future::poll_fn(|cx| {
            if ends.get() {
                return Poll::Ready(None);
            }
            let mut inner = self.inner();
            if let Some(request) = inner.requests.pop_front() {
                return Poll::Ready(Some(request));
            }
            if inner.closed {
                return Poll::Ready(None);
            }
            inner.idle.push(cx.waker().clone());
            Poll::Pending
        })
        .await
    }
}

/// Ends the queue whichever way the thread ends, so that nobody waits for it.
struct CloseAtEnd<'a>(&'a Queue);

impl Drop for CloseAtEnd<'_> {
    fn drop(&mut self) {
        self.0.close();
        self.0.inner().requests.clear();
    }
}

/// The client's thread: a core whose tasks take requests as they come, as long as the session lasts; then another.
fn run(pool: &Pool, name: &str, queue: &Queue, ready: &mpsc::Sender<Result<(), Error>>) {
    let _closes = CloseAtEnd(queue);
    let mut opened = match Opened::new(pool, name, TASKS, &Options::default()) {
        Ok(opened) => opened,
        Err(error) => return drop(ready.send(Err(error))),
    };
    if ready.send(Ok(())).is_err() {
        return;
    }
    let store = opened.kvs[0].store().clone();
    let mut again = Vec::new();
    loop {
        let Some(left) = serve_all(opened, queue, again) else { return };
        again = left;
        opened = loop {
            if again.is_empty() {
                let Some(request) = block_on((), queue.pop(&Cell::new(false))) else { return };
                again.push(request);
            }
            match Opened::again(pool, &store, TASKS, &Options::default()) {
                Ok(opened) => break opened,
                Err(error) => {
                    // Those who wait in line are told as well: to find out for each takes too long.
                    let error = not_opened(&error);
                    let waiting = queue.take_all();
                    again.drain(..).chain(waiting).for_each(|request| request.fail(error.clone()));
                }
            }
        };
    }
}

/// Serves what is asked, `again` first, until the session is over; answers what is to be tried over another. Nothing
/// once the queue is closed and empty.
fn serve_all(opened: Opened, queue: &Queue, again: Vec<Request>) -> Option<Vec<Request>> {
    let Opened { endpoint, kvs } = opened;
    let (again, left) = (RefCell::new(again), RefCell::new(Vec::new()));
    let is_over = Cell::new(false);
    let mut core = Core::new(&endpoint);
    for mut kv in kvs {
        let (again, left, is_over) = (&again, &left, &is_over);
        core.spawn(async move {
            loop {
                // What was tried once is answered now, whatever comes of it.
                let second = again.borrow_mut().pop();
                let may_return = second.is_none();
                let request = match second {
                    Some(request) => request,
                    None => match queue.pop(is_over).await {
                        Some(request) => request,
                        None => return,
                    },
                };
                let served = serve(&mut kv, request, may_return).await;
                if !matches!(served, Served::Answered) {
                    is_over.set(true);
                    queue.wake_idle();
                }
                if let Served::Returned(request) = served {
                    left.borrow_mut().push(request);
                }
            }
        });
    }
    core.run();
    drop(core);
    is_over.get().then(|| left.into_inner())
}

/// What came of a request.
enum Served {
    /// It was answered.
    Answered,
    /// It was answered, and nothing more will be over this session.
    Over,
    /// This session is over, and the request was not carried out.
    Returned(Request),
}

async fn serve(kv: &mut AnyKv<Rc<Endpoint>>, request: Request, may_return: bool) -> Served {
    let returns = |error: &KvError| may_return && may_try_again(error);
    match request {
        Request::Get { key, done } => match kv.get(&key).await.map(|item| item.map(owned)) {
            Err(error) if returns(&error) => Served::Returned(Request::Get { key, done }),
            got => done.keep(got),
        },
        Request::Put { key, value, done } => match kv.put(&key, &value).await {
            Err(error) if returns(&error) => Served::Returned(Request::Put { key, value, done }),
            put => done.keep(put),
        },
        Request::Delete { key, done } => match kv.delete(&key).await {
            Err(error) if returns(&error) => Served::Returned(Request::Delete { key, done }),
            deleted => done.keep(deleted),
        },
        Request::PutIfAbsent { key, value, done } => match kv.put_if_absent(&key, &value).await {
            Err(error) if returns(&error) => Served::Returned(Request::PutIfAbsent { key, value, done }),
            put => done.keep(put),
        },
        Request::CompareAndPut { key, expected, value, done } => {
            match kv.compare_and_put(&key, expected, &value).await {
                Err(error) if returns(&error) => {
                    Served::Returned(Request::CompareAndPut { key, expected, value, done })
                }
                put => done.keep(put),
            }
        }
        Request::GetMany { keys, done } => match get_many(kv, &keys).await {
            Err(error) if returns(&error) => Served::Returned(Request::GetMany { keys, done }),
            got => done.keep(got),
        },
        Request::PutMany { items, done } => match put_many(kv, &items).await {
            Err(error) if returns(&error) => Served::Returned(Request::PutMany { items, done }),
            put => done.keep(put),
        },
    }
}

fn owned(item: Item<'_>) -> Value {
    Value { value: item.value.to_vec(), version: item.version }
}

async fn get_many(kv: &mut AnyKv<Rc<Endpoint>>, keys: &[Vec<u8>]) -> Result<Vec<Option<Value>>, KvError> {
    let mut values = vec![None; keys.len()];
    let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let visit = |place: usize, item: Option<Item<'_>>| values[place] = item.map(owned);
    kv.get_many(&keys, visit).await?;
    Ok(values)
}

async fn put_many(kv: &mut AnyKv<Rc<Endpoint>>, items: &[(Vec<u8>, Vec<u8>)]) -> Result<(), KvError> {
    let items: Vec<(&[u8], &[u8])> = items.iter().map(|(key, value)| (&key[..], &value[..])).collect();
    kv.put_many(&items).await
}

impl Request {
    /// Answers a request that was not carried out.
    fn fail(self, error: KvError) {
        let error = Error::Kv(error);
        match self {
            Request::Get { done, .. } => done.fulfil(Err(error)),
            Request::Put { done, .. } | Request::PutMany { done, .. } => done.fulfil(Err(error)),
            Request::Delete { done, .. } | Request::PutIfAbsent { done, .. } => done.fulfil(Err(error)),
            Request::CompareAndPut { done, .. } => done.fulfil(Err(error)),
            Request::GetMany { done, .. } => done.fulfil(Err(error)),
        }
    }
}

impl<T> Promise<T> {
    fn keep(self, result: Result<T, KvError>) -> Served {
        let served = match &result {
            Err(error) if is_over(error) => Served::Over,
            _ => Served::Answered,
        };
        self.fulfil(result.map_err(Error::Kv));
        served
    }
}
