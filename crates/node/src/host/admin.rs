//! The node's admin face: HTTP for people and machines that watch it. Never on the path of data.
//!
//! `GET /health` and `GET /stores` answer JSON, `GET /metrics` OpenMetrics: what one-sided clients do is counted by
//! themselves in their session slots, and summed here. Invariant: no answer holds a key's secret or an address.

use super::Shared;
use super::clients::BindError;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use farside_remote::control::{Answer, Ask};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::oneshot;

/// Where the admin face listens, and who may look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// Off loopback, a token is required.
    pub listen: SocketAddr,
    /// What a client must send as `Authorization: Bearer TOKEN`.
    pub token: Option<String>,
}

/// The thread that serves; ends when dropped.
pub(super) struct Server {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

const DRAIN: Duration = Duration::from_millis(100);
const ANSWER_WAIT: Duration = Duration::from_secs(1);

#[derive(Clone)]
struct Face {
    shared: Arc<Shared>,
    token: Option<Arc<str>>,
}

impl Server {
    pub(super) fn start(shared: Arc<Shared>, admin: &Admin) -> Result<Server, BindError> {
        if !admin.listen.ip().is_loopback() && admin.token.is_none() {
            return Err(BindError::NoToken(admin.listen));
        }
        let refused = |error| BindError::Admin(admin.listen, error);
        let listener = TcpListener::bind(admin.listen).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(refused)?;
        let face = Face { shared, token: admin.token.as_deref().map(Arc::from) };
        let (stop, stopped) = oneshot::channel();
        let serve = async move {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            // What is under way has a moment to end; a connection that dawdles does not keep the node from ending.
            tokio::select! {
                served = axum::serve(listener, router(face)) => served,
                () = async {
                    stopped.await.unwrap_or(());
                    tokio::time::sleep(DRAIN).await;
                } => Ok(()),
            }
        };
        let thread = std::thread::Builder::new()
            .name("farside-admin".into())
            .spawn(move || {
                if let Err(error) = runtime.block_on(serve) {
                    tracing::error!(%error, "the admin face has ended");
                }
                runtime.shutdown_timeout(DRAIN);
            })
            .map_err(refused)?;
        Ok(Server { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn router(face: Face) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/stores", get(stores))
        .route("/metrics", get(metrics))
        .fallback(|| async { (StatusCode::NOT_FOUND, "there are /health, /stores and /metrics\n") })
        .layer(axum::middleware::from_fn_with_state(face.clone(), authorize))
        .with_state(face)
}

async fn authorize(
    State(face): State<Face>,
    request: axum::extract::Request,
    next: axum::middleware::Next,
) -> Response {
    if face.token.as_deref().is_none_or(|token| presents(request.headers(), token)) {
        return next.run(request).await;
    }
    let challenge = [(header::WWW_AUTHENTICATE, "Bearer")];
    (StatusCode::UNAUTHORIZED, challenge, "send 'Authorization: Bearer TOKEN'\n").into_response()
}

/// Whether the token was sent; takes the same time wherever a wrong one differs.
fn presents(headers: &HeaderMap, token: &str) -> bool {
    let sent = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let Some(sent) = sent.and_then(|value| value.strip_prefix(b"Bearer ")) else { return false };
    let difference = sent.iter().zip(token.as_bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    sent.len() == token.len() && difference == 0
}

async fn health(State(face): State<Face>) -> Response {
    let stopped = face.shared.state().stopped.clone();
    let status = if stopped.is_empty() { "ok" } else { "memory waits for stopped processes" };
    Json(serde_json::json!({ "status": status, "stopped_pids": stopped })).into_response()
}

async fn stores(State(face): State<Face>) -> Response {
    match ask(face, Ask::ListStores).await {
        Ok(Answer::Stores(stores)) => {
            let told: Vec<_> = stores
                .into_iter()
                .map(|store| {
                    serde_json::json!({ "name": store.name, "kind": store.kind, "quota_bytes": store.quota })
                })
                .collect();
            Json(told).into_response()
        }
        Ok(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason).into_response(),
    }
}

async fn ask(face: Face, ask: Ask) -> Result<Answer, String> {
    let asked = tokio::task::spawn_blocking(move || face.shared.ask(ask, ANSWER_WAIT)).await;
    asked.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
}

async fn metrics(State(face): State<Face>) -> Response {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Figures { shared: face.shared }));
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// The node's figures at the moment that they are asked for.
struct Figures {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Figures")
    }
}

impl Collector for Figures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let state = self.shared.state();
        let info = state.node.info();
        let Ok(counted) = state.node.counters(&self.shared.memory);
        let stopped = state.stopped.len() as u64;
        let stores = state.node.catalog().iter().count() as u64;
        drop(state);
        let mut counter = |name, help, unit: Option<&Unit>, value: u64| {
            let metric = ConstCounter::new(value);
            metric.encode(encoder.encode_descriptor(name, help, unit, metric.metric_type())?)
        };
        counter("farside_chains", "Chains run by clients", None, counted.chains)?;
        counter("farside_ops", "Operations in those chains", None, counted.ops)?;
        counter("farside_atomics", "CAS and FETCH-ADD asked for", None, counted.atomics)?;
        counter("farside_request", "Wire size of the chains", Some(&Unit::Bytes), counted.bytes_in)?;
        counter("farside_reply", "Wire size of the replies", Some(&Unit::Bytes), counted.bytes_out)?;
        counter("farside_not_ready", "Chains that found no buffer", None, counted.not_ready)?;
        counter("farside_refused", "Chains refused for access or as invalid", None, counted.refused)?;
        counter("farside_retired_buffers", "Buffers given back by clients", None, counted.retired)?;
        counter("farside_reclaimed_buffers", "Buffers back on a list", None, info.reclaimed_buffers)?;
        counter("farside_scanned_buffers", "Buffers found lost by a scan", None, info.scanned_buffers)?;
        let mut gauge = |name, help, unit: Option<&Unit>, value: u64| {
            let metric = ConstGauge::new(value as i64);
            metric.encode(encoder.encode_descriptor(name, help, unit, metric.metric_type())?)
        };
        gauge("farside_memory", "Memory lent", Some(&Unit::Bytes), info.memory_bytes)?;
        gauge("farside_unassigned", "Memory that no store has", Some(&Unit::Bytes), info.unassigned_bytes)?;
        gauge("farside_stores", "Stores", None, stores)?;
        gauge("farside_sessions", "Sessions open", None, info.sessions)?;
        gauge("farside_stopped_clients", "Stopped processes that memory waits for", None, stopped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_is_a_token() {
        let sends = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().expect("a header"));
            presents(&headers, "secret")
        };
        assert!(sends("Bearer secret"));
        for wrong in ["Bearer secre", "Bearer secrets", "Bearer Secret", "Bearer ", "Basic secret", "secret"]
        {
            assert!(!sends(wrong), "{wrong}");
        }
        assert!(!presents(&HeaderMap::new(), "secret"));
    }
}
