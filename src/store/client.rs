//! The HTTP client of all stores. It does not read the bodies of error responses: their length is
//! not bounded, and messages do not show them.

use futures_util::future::BoxFuture;
use object_store::{
    ClientOptions,
    client::{
        HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService,
        ReqwestConnector,
    },
};

/// Makes clients.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(BodilessErrors(client)))
    }
}

/// A client whose errors are a status alone.
#[derive(Debug)]
struct BodilessErrors(HttpClient);

impl HttpService for BodilessErrors {
    fn call<'c, 'f>(&'c self, request: HttpRequest) -> BoxFuture<'f, Answer>
    where
        'c: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            let answer = self.0.execute(request).await?;
            let is_error = answer.status().is_client_error() || answer.status().is_server_error();
            Ok(if is_error { answer.map(|_| String::new().into()) } else { answer })
        })
    }
}

type Answer = Result<HttpResponse, HttpError>;
